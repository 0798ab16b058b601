"""One guest's domain: elements from all plugins merged into one, rendered as libvirt's XML."""
