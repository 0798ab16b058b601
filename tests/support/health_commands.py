"""Configure a health command on nodes of scripts/cluster that fails while a file exists."""

import contextlib

import slurm_cluster as slurm

CONF, WELL, ILL = "/etc/vtorque/vtorque.toml", "/etc/vtorque/well", "/etc/vtorque/ill"
WHY = "its disk is slow"
COMMAND = f"""#!/bin/sh
[ ! -e {ILL} ] || {{ echo "{WHY}"; exit 1; }}
"""


@contextlib.contextmanager
def checked(cluster, **settings):
    """Run health checks on all nodes each second; their config must have a [plugin.survive]."""
    table = {"health_command": f'"{WELL}"', "health_interval": 1, **settings}
    lines = "".join(f"\\n{key} = {value}" for key, value in table.items())
    for node in slurm.NODES:
        cluster.root(node, "sh", "-c", f"cat > {WELL}; chmod 700 {WELL}", stdin=COMMAND.encode())
        cluster.root(node, "sed", "-i", rf"s|^\[plugin.survive\]$|&{lines}|", CONF)
    yield
    for node in slurm.NODES:
        cluster.root(node, "rm", "-f", WELL, ILL)


@contextlib.contextmanager
def unhealthy(cluster, node):
    """Make a node unhealthy; afterwards it is healthy, and gets jobs again."""
    cluster.root(node, "touch", ILL)
    try:
        yield
    finally:
        cluster.root(node, "rm", "-f", ILL)
        cluster.root("head", "scontrol", "update", f"nodename={node}", "state=resume", check=False)


def state(cluster, node):
    """Return a node's state and reason in Slurm, without the mark for a missing answer (*)."""
    return cluster.states()[node].replace("* ", " ", 1)
