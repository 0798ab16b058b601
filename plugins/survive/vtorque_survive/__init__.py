"""Suspend, checkpoint, restore and migrate jobs, and drain nodes."""
