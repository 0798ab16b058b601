"""Create and delete the batch system's worker nodes as jobs need them."""
