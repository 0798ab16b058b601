"""From a validated request to placed guests."""
