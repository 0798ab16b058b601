"""vCPU pinning, huge pages and NUMA binding."""
