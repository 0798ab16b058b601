"""What runs inside guests, and which kind of Linux that is."""
