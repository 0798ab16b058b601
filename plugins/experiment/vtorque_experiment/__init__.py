"""Run jobs with many parameter values, record their numbers, and compare them."""
