"""Prologue and start of guests."""
