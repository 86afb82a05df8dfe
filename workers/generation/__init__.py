"""What a sampler computes: the engine, the KV that it attends over, and tokens from logits. No process, no message."""
