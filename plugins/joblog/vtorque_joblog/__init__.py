"""Sinks for job logs: syslog, journald, a JSON file, and sinks of other distributions."""
