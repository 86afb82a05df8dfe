"""The supervisor's end of the environment processes: calls out, replies back, who hangs and what is lost with one."""
