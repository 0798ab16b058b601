"""``mpirun`` of Open MPI, MPICH and Intel MPI finds a job's guests without a flag."""
