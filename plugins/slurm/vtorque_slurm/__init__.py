"""vTorque on Slurm: see :mod:`vtorque_slurm.plugin`."""
