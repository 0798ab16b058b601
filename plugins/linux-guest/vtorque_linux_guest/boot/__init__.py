"""The seed of a guest and the setup that it runs at boot."""
