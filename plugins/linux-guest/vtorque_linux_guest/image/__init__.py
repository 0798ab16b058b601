"""Image builders: make kernel, initramfs and root disk from recipes and packages."""
