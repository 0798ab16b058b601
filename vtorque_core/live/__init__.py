"""Public API for plugins' own processes and commands on a node."""
