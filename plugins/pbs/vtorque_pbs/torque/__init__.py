"""What is Torque's only."""
