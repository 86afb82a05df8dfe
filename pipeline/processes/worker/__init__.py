"""What the processes of every role share: their start and memory, their place in the pool, watch, and replacement."""
