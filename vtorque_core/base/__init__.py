"""What everything stands on: errors, names, safe files, locks, processes, libvirt."""
