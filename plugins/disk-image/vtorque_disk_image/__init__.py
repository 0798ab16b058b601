"""Build images from existing disks."""
