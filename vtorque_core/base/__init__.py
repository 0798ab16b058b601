"""Foundation of all packages: errors, names, safe file operations, locks, processes, libvirt."""
