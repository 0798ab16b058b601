"""The built-in cloud drivers. Each module is loaded only if the site uses the driver."""
