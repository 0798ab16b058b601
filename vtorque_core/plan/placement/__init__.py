"""Place guests: choose their cores and memory, and items of pools, such as network cards."""
