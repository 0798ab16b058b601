"""The batch systems Torque and OpenPBS, as a vTorque plugin."""
