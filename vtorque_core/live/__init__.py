"""Public: what a plugin's own root process may ask of a running node."""
