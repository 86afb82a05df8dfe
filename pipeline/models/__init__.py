"""What a run must know of its model before any process starts: how it is found, read, and told from others."""
