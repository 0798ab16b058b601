"""A job in its guest, seen from the host: the driver, the agent's two ports, terminals, ssh."""
