"""The drivers that come with the pool; each imports what it needs when it is made."""
