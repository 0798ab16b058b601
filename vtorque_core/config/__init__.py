"""Site config, users' requests, and loaded plugins."""
