"""Public: what plugins' own processes and commands may ask of a node."""
