"""What is written of a job: journal, timeline, log, usage, console."""
