"""Let ``mpirun`` of Open MPI, MPICH and Intel MPI find a job's guests without options."""
