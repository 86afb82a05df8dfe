"""From groups to what the learner is sent: rows, what a truncated trajectory counts for, batches, parts sent early."""
