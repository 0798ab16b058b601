"""Conventions that more than one batch system's plugin speaks; public."""
