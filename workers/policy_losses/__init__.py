"""The losses that the learner knows by name, what they are made of, and a user's own."""
