"""Records of a job: journal, timeline, log, usage, console."""
