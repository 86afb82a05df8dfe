"""The supervisor's end of the learner: batches out, updates back, a new process brought to a dead one's version."""
