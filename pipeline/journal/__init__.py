"""The journal: the one truth about what a run decided, and what completes the logs from it."""
