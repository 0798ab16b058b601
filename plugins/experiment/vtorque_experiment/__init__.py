"""Run jobs with many parameter values, record their numbers, and compare them.

A *combination* has a value for each parameter. A *point* is one job: one run of a combination.
"""
