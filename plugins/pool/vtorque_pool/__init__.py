"""Create machines for waiting jobs as nodes of the batch system, and delete idle machines."""
