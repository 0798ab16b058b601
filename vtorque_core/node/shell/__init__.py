"""The job shell: the script's way into the guest."""
