"""The embedded batch system: a plugin in the core's distribution."""
