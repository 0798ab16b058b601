"""Start a task of the Snap telemetry framework for each job."""
