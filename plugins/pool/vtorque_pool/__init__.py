"""Worker nodes of the batch system that come and go with the work."""
