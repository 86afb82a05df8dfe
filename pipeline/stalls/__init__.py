"""What a run does when nothing moves any more: it writes down what everybody is at, and goes on or stops."""
