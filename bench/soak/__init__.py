"""The soak: runs whose processes are killed, stopped and frozen at random, under an outside audit."""
