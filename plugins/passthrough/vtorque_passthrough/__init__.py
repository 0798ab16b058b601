"""PCIe passthrough by classes that the site defines."""
