"""Image builders: from recipes and packages to kernel, initramfs and root disk."""
