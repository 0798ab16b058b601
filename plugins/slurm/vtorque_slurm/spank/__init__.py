"""SPANK plugin for ``--vm=`` of sbatch, srun and salloc: its source, build and installation."""
