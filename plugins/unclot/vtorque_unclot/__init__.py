"""Memory that the guests of a job on one node share."""
