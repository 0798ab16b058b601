"""vtorque-jobs: which jobs there are, where they are, and what one may ask for."""
