"""How much memory a run takes, told before any process starts, and the sizes that are chosen to fit it."""
