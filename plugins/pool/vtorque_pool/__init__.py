"""Create and delete machines as nodes of the batch system, as jobs need them."""
