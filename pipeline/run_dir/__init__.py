"""What one run's directory holds: its files' names, how they are written and read, whose it is, and who may go on."""
