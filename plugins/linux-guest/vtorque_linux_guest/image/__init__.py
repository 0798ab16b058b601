"""Image builders: recipes and packages to kernel, initramfs and root disk."""
