"""Programs that run in guests, and the Linux family of an image."""
