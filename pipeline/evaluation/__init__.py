"""Held-out rows measured: beside training, pinned to one version, or without training."""
