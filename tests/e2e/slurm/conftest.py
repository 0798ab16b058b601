"""The cluster for every test here."""

import pytest

import slurm_cluster

CONFIG = "/etc/vtorque/vtorque.toml"
TABLE = b'\n[plugin.archive]\ndirectory = "{home}/.vtorque/jobs"\n'


@pytest.fixture(scope="session")
def cluster():
    """Return the cluster, made if it is not up."""
    return slurm_cluster.bring_up()


@pytest.fixture
def clean(cluster):
    """Fail the test if a job leaves anything on the cluster; replaces the single node's."""
    with slurm_cluster.nothing_left(cluster):
        yield cluster


@pytest.fixture
def archive(clean):
    """Enable the plugin on all machines for one test; return the user's directory."""
    machines = ("head", *slurm_cluster.NODES)
    for machine in machines:
        clean.root(machine, "cp", CONFIG, f"{CONFIG}.before")
        clean.root(machine, "tee", "-a", CONFIG, stdin=TABLE)
    directory = clean.home / ".vtorque" / "jobs"
    yield directory
    for machine in machines:
        clean.root(machine, "mv", f"{CONFIG}.before", CONFIG)
    clean.user("rm", "-rf", ".vtorque")
