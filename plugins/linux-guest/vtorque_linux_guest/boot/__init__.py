"""A guest's seed disk, and the setup script that the guest runs at boot."""
