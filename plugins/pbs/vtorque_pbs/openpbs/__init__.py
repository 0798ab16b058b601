"""OpenPBS only: hooks, node adapter and setup."""
