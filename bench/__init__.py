"""Comparisons that print ratios to a peer measured in the same run, and what makes a real model to try."""
