"""Comparisons that print ratios to a peer measured in the same run."""
