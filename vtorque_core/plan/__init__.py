"""Plan and place the guests of a validated request."""
