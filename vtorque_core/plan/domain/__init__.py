"""A guest's domain: merge elements of all plugins, render libvirt XML."""
