"""vtorque-disk-image: images from disks that somebody else has made."""
