"""The prologue and the start of guests."""
