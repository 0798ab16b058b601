"""Set up many nodes, and copy images to them, from one host."""
