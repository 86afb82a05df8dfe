"""Users' environments at work: what runs in the processes (or the thread) that serve them.

What users write against is `pipeline/env.py` and `pipeline/user_code/tools.py`; how their code is found and loaded,
`pipeline/user_code/`; the supervisor's end, `pipeline/processes/environment/`.
"""
