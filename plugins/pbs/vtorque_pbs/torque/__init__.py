"""Torque only: hooks, node adapter and setup."""
