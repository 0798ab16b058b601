"""vTorque: what each job uses, from the host up to the application."""
