"""What a run's processes are told, before any starts: how much memory it takes, and the sizes that fit it."""
