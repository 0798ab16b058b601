"""vtorque-oci: guest images from containers."""
