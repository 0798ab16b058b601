"""Job shell: runs the script in the guest."""
