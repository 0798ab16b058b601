"""Public, for plugins' commands: what is kept of the jobs of this node, for owners and root.

A :class:`Place` is the directory of one job attempt: ``job.json`` (``facts()``), ``log.jsonl``,
``series.jsonl``. What stands there may be what a guest has said: take it for a stranger's text.
"""

from __future__ import annotations

import os
from pathlib import Path

from vtorque_core.config import paths_of, read_toml
from vtorque_core.errors import EXIT_GUEST_DIED, EXIT_HOST_FAULT, EXIT_REFUSED, Refused, printable
from vtorque_core.kept import JOB, MAX_JOB, Place, find

__all__ = [
    "EXIT_GUEST_DIED",
    "EXIT_HOST_FAULT",
    "EXIT_REFUSED",
    "JOB",
    "MAX_JOB",
    "Place",
    "attempts",
    "printable",
]


def attempts(config: Path, job_id: str) -> list[Place]:
    """Return the attempts of a job that are kept here, the last one at the end.

    As root of anybody's job, else of one's own. Raises Refused if there are none, ConfigError.
    """
    uid = None if os.geteuid() == 0 else os.getuid()
    found = find(paths_of(read_toml(config)), job_id, uid)
    if not found:
        whose = "" if uid is None else " of yours"
        raise Refused(
            f"nothing is kept here of a job {printable(job_id)}{whose}: look on the node where it "
            "runs, or did"
        )
    return found
