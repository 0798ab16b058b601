"""vtorque-cluster: set up many nodes, and send them images, from one host."""
