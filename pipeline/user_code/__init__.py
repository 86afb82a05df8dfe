"""Users' code before it is at work: named, found, loaded, asked what it is, and what it raises put into words."""
