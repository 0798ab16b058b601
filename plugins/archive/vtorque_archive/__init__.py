"""What is kept of an ended job, in a directory that its user can read from everywhere."""
