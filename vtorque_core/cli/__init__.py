"""Command-line programs of vTorque."""
