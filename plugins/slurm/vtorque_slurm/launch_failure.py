"""Record why Slurm did not start a job's script, because no process of the job can report this."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from vtorque_core.api import HostFault, Paths, Refused, kept_records
from vtorque_core.api.kept_records import LOG
from vtorque_slurm import controller_updates, job_records
from vtorque_slurm.batch_commands import SlurmClient

_SHORT = 10.0  # seconds: a script that ran longer was started, so the controller is not queried


def keep(client: SlurmClient, paths: Paths, job_id: str) -> None:
    """Record in an ended job's kept records why Slurm did not start its script.

    Errors are ignored. Privileges: root. Called: in Epilog.
    """
    places = kept_records.find(paths, job_id)
    facts = places[-1].facts() if places else {}
    if facts.get("reason") or not 0 <= _run_seconds(facts) < _SHORT:
        return
    with contextlib.suppress(HostFault, Refused, OSError):
        why = job_records.launch_failure(controller_updates.show_job(client.run, job_id), job_id)
        if not why:
            return
        places[-1].add_facts(reason=why)
        entry = {"t": time.time(), "level": "ERROR", "plugin": "slurm", "job": job_id}
        entry |= {"node": facts.get("node", ""), "message": f"ended: {why}"}
        with os.fdopen(places[-1].append(LOG), "ab") as log:
            log.write(json.dumps(entry).encode() + b"\n")


def _run_seconds(facts: Mapping[str, Any]) -> float:
    phases = facts.get("phases")
    for phase in phases if isinstance(phases, list) else []:
        if phase["name"] == "run" and phase["guest"] is None:
            return float(phase["seconds"])
    return -1.0
