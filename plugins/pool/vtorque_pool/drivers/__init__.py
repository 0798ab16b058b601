"""The built-in cloud drivers. Each imports its libraries when it is created."""
