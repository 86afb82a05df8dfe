"""Processes as the system sees them: started, watched, ended with all they have started, asked for their stacks."""
