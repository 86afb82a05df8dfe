"""What runs inside Headway's sampler and learner processes, and the messages that they speak."""
