"""PCIe passthrough of cards, by classes that the site defines."""
