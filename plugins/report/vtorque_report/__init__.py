"""``vmgr report``: how a job used the resources that it requested."""
