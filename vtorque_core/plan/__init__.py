"""From a decided request to placed guests."""
