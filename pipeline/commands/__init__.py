"""The command line: its commands, their options and configs, and what a user sees of a run. The library never imports it."""
