"""Dedicated CPU cores for the I/O threads of a guest; the number of cores follows the load."""
