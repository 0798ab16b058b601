"""Which cores, memory and pool items a guest gets."""
