"""Names of vTorque's distributions. Messages recommend to install only these.

An attacker could register any other name with a package index.
"""

from __future__ import annotations

import sys

CORE = "vtorque-core"
TESTING = "vtorque-testing"
"""Distributions for authors of plugins, not for nodes."""
PLUGINS = {
    name: f"vtorque-{name}"
    for name in (
        "admin", "archive", "cluster", "disk-image", "experiment", "images", "iocm", "joblog",
        "jobs", "linux-guest", "local", "login", "mpi", "oci", "osv", "own-images", "passthrough",
        "pbs", "pinning", "pool", "report", "scam", "slurm", "snap", "survive", "telemetry",
        "unclot", "vrdma", "warm",
    )
}  # fmt: skip
"""Names of distributions, by plugin name."""
BATCH_SYSTEMS = {"local": "local", "openpbs": "pbs", "slurm": "slurm", "torque": "pbs"}
"""Names of plugins, by batch system."""


def how_to_install(distribution: str, version: str = "") -> str:
    wanted = distribution + (f"=={version}" if version else "")
    name = distribution.removeprefix("vtorque-")
    if distribution not in (CORE, TESTING, *PLUGINS.values()):
        return f"install {wanted} from where its author offers it"
    return (
        f"{sys.prefix}/bin/pip install --no-index --find-links WHEELS '{wanted}' "
        f"(WHEELS: a directory of wheels; in a checkout: scripts/wheels WHEELS {name})"
    )


def how_to_get(plugin: str) -> str:
    if plugin in PLUGINS:
        return how_to_install(PLUGINS[plugin])
    return "ask its author for the distribution that provides it"
