"""What the admin has written, what the user asks for, and the plugins that are on."""
