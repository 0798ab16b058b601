"""vtorque-images: the commands of the image pool, and what doctor says of it."""
