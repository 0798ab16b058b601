"""The image pool."""
