"""What an admin does to a node: set up, examine."""
