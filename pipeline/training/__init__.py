"""From finished groups to policy updates: batches, the loop over them, and what each step reports."""
