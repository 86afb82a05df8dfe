"""What the learner computes: training rows packed, forward/backward, the optimizer step. No process, no message."""
