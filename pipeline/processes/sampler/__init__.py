"""The supervisor's end of the samplers: requests out, segments back, a new process in the place of a dead one."""
