"""vTorque plugin for the Slurm batch system; see :mod:`vtorque_slurm.plugin`."""
