"""The command line: its commands, their options and configs, and what a user sees of a run. Nothing else imports it."""
