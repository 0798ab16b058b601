"""The commands that manage the image pool, and its health checks."""
