"""The rows that a run trains on."""
