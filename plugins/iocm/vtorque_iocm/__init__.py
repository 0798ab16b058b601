"""Dedicated CPU cores for the I/O threads of a guest; their number follows the load."""
