"""Checkpoints of a run: made whole or not at all, found again when they are, and kept while recovery needs them."""
