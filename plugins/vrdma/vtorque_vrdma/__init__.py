"""RDMA between the guests of a job."""
