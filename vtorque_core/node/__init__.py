"""The processes of root and of the job shell on a node."""
