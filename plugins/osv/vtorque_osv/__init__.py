"""OSv guests: unikernels that run the command lines of a job."""
