"""The cluster for every test here."""

import pytest

import slurm_cluster


@pytest.fixture(scope="session")
def cluster():
    """Return the cluster, made if it is not up."""
    return slurm_cluster.bring_up()


@pytest.fixture
def clean(cluster):
    """Fail the test if a job leaves anything on the cluster; instead of the single node's."""
    with slurm_cluster.nothing_left(cluster):
        yield cluster
