"""Copy an ended job's records to a directory that its user can read from any host."""
