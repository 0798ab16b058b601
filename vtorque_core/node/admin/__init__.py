"""Set up and check a node."""
