"""Resources of the core, in one module for each kind."""
