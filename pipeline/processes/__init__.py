"""A run's processes seen from the supervisor: started, watched, replaced, and spoken to through shared memory."""
