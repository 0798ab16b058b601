"""What a job did with what it asked for: ``vmgr report``."""
