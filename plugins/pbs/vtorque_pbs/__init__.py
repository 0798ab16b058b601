"""vTorque plugin for the batch systems Torque and OpenPBS."""
