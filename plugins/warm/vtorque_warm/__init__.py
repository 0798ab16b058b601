"""Guests that are ready before the job comes: how many, and of which size."""
