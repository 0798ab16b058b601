"""Users run jobs in their own container images."""
