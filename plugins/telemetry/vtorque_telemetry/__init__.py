"""Measure the resource usage of each job, from the host to the application."""
