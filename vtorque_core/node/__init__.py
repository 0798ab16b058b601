"""Processes of root and of the job shell on a node."""
