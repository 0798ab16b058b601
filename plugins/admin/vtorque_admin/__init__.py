"""vtorque-admin: prepare a node for guests, and check it."""
