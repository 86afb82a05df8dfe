"""The command line: its commands, their options and configs, and what a user sees of a run.

The rest of pipeline/ never imports it; benches do.
"""
