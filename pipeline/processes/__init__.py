"""A run's processes seen from the supervisor: started, watched, replaced, and spoken to through shared memory.

`active_run` holds all of one run together; `opening` starts it. What concerns one role alone is in `learner`, `sampler`
and `environment`, what they share in `worker`. Those import `worker` and nothing of each other's.
"""
