"""Users' environments at work: the processes (or the thread) that run them, and the supervisor's end of those.

What users write against is `pipeline/env.py` and `pipeline/tools.py`.
"""
