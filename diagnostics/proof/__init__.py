"""Which code the serving processes run: evidence from the host, and the verdict on it."""
