"""Sinks for the logs of jobs: syslog, journald, stderr, a JSON file, a file of the user's own."""
