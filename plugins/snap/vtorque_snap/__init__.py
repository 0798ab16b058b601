"""A task of the Snap telemetry framework for each job."""
