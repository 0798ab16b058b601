"""Build guest images from containers."""
