"""vtorque-jobs: list and cancel jobs, show their placement, explain limits."""
