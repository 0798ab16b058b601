"""OSv guests: unikernels that run a job's command lines."""
