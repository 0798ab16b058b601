"""Keep warm (pre-booted) guests for jobs."""
