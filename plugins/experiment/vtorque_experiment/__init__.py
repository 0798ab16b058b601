"""Run jobs with many parameter values, record their numbers, and compare the results.

A *combination* has a value for each parameter (*axis*). A *point* is one job: one run of a
combination. A *number* is a named value that is measured in each point.
"""
