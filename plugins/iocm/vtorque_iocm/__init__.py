"""I/O cores: cores of a guest's own for its I/O threads, more of them under load."""
