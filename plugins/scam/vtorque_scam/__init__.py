"""Protection of guests from cache side channels."""
