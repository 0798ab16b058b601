"""What a guest gets to boot with: its seed and the set-up that it runs."""
