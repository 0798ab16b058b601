"""Place guests: cores, memory and pool items."""
