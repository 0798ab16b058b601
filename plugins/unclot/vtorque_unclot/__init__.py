"""Shared memory for the guests of a job on one node."""
