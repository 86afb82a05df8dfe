"""Between conversations and token ids: what a chat format is, the tiny model's, and those of model directories."""
