"""vtorque-admin: set up and check a node, show the site config and the plugins."""
