"""Environments of other packages, by name: `reasoning_gym:TASK`, `verifiers:TASKSET`."""
