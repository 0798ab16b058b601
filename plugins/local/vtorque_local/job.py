"""The record of a job, and the job's files in the spool."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import json
import os
import pwd
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import JobAttempt, Paths, UsageError, VtorqueError, kept_records, name_errors
from vtorque_core.api.job_files import File, Tree
from vtorque_core.api.kept_records import LOG
from vtorque_core.live.service import own_variables
from vtorque_local.job_processes import COOKIE
from vtorque_local.order import LocalSubmission
from vtorque_pbs import convention as pbs

MAX_SCRIPT = 4 << 20  # bytes
MAX_REST = 8 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@dataclass
class LocalJob:
    """One job, stored as JSON.

    Attributes:
        hook: Arguments of the prologue.
        environ: Variables that the owner cannot change.
        interactive: True if the job has a terminal and no output files.
        in_guest: True if the job shell runs the script in a guest; False on bare metal.
        walltime: Seconds; 0 means unlimited.
        size: Bytes of script and environment.
        at_once: Limit of concurrent tasks of the job's array; 0 means unlimited.
        state: Q (queued), P (prologue), R (running) or E (epilogue).
        status: Torque's exit_status, or None if unknown.
        reason: Why the job ended or is waiting, shown to the owner.
        started: Unix time.
        cgroup: Directory of the cgroup, or "".
    """

    uid: int
    hook: list[str]
    environ: dict[str, str]
    interactive: bool
    in_guest: bool
    walltime: int
    size: int
    at_once: int = 0
    state: str = "Q"
    status: int | None = None
    reason: str = ""
    session: int = 0
    started: float = 0.0
    cgroup: str = ""

    @property
    def id(self) -> str:
        """Job id."""
        return self.hook[0]

    @property
    def array(self) -> str:
        """Id of the job's array, ``22[].host``, or the job's own id."""
        return array_of(self.id)

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.hook[3]

    def encode(self) -> bytes:
        """Return the job as JSON."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> LocalJob:
        """Parse the JSON from :meth:`encode`."""
        return cls(**json.loads(data))

    def order(self, wrapper: Sequence[str], text: str = "") -> dict[str, Any]:
        """Return the values from the service that ``become_job`` needs to execute the job.

        ``become_job`` gets all other values, such as the user's environment, in a file from the
        client's process. If ``text`` is not empty, ``become_job`` only appends ``text`` to the
        job's stderr.
        """
        return {
            "starter": os.getpid(),
            "environ": self.environ,
            "wrapper": list(wrapper) if self.in_guest else [],
            "task": "".join(pbs.sequence(self.id).partition("-")[1:]),  # "-3", or ""
            "names": pbs.output_names(self.name, self.id),
            "line": "" if self.interactive else shlex.quote(self.hook[7]),
            "text": text,
        }


def make_job(
    job_id: str, want: LocalSubmission, uid: int, host: str, directory: Path, size: int
) -> LocalJob:
    """Return a new job, with the attributes and variables that Torque's qsub and pbs_mom would set.

    ``job_id`` is ``number.host``, or ``number[task].host`` for an array task. ``directory`` is the
    job's directory in the spool. ``size`` counts the bytes of script and environment.
    """
    account = pwd.getpwuid(uid)
    group = grp.getgrgid(account.pw_gid).gr_name
    resources = pbs.build_resources(want.resources())
    script = str(directory / f"{job_id}.SC")
    hook = pbs.PrologueArgs(
        job_id, account.pw_name, group, want.name, resources, "local", script=script
    )
    environ = _environ(hook, want, account, host, directory)
    walltime, in_guest, at_once = want.walltime, bool(want.token), want.tasks()[1]
    return LocalJob(uid, hook.argv(), environ, want.interactive, in_guest, walltime, size, at_once)


def array_of(job_id: str) -> str:
    """Return the id of a task's array, ``22[].host``, or the job's own id."""
    number, dot, host = job_id.partition(".")
    name, bracket, _ = number.partition("[")
    return f"{name}[]{dot}{host}" if bracket else job_id


def is_meant(wanted: str, job_id: str) -> bool:
    """Return whether the user's job id ``wanted`` names the job or its array."""
    ids = (job_id, array_of(job_id))
    return wanted in (*ids, *(each.partition(".")[0] for each in ids))


def _environ(
    hook: pbs.PrologueArgs, want: LocalSubmission, account: pwd.struct_passwd, host: str, at: Path
) -> dict[str, str]:
    kind = "INTERACTIVE" if want.interactive else "BATCH"
    task = pbs.sequence(hook.job_id).partition("-")[2]
    found = own_variables() | {
        "HOME": account.pw_dir,
        "LOGNAME": account.pw_name,
        "USER": account.pw_name,
        "SHELL": account.pw_shell or "/bin/sh",
        "ENVIRONMENT": kind,
        "PBS_ENVIRONMENT": f"PBS_{kind}",
        COOKIE: os.urandom(16).hex().upper(),
        "PBS_JOBID": hook.job_id,
        "PBS_JOBNAME": hook.job_name,
        "PBS_NODEFILE": str(at / "nodes"),
        "PBS_NODENUM": "0",
        "PBS_NP": str(want.ppn or 1),
        "PBS_NUM_NODES": "1",
        "PBS_NUM_PPN": str(want.ppn or 1),
        "PBS_O_QUEUE": "local",
        "PBS_QUEUE": "local",
        "PBS_SERVER": host,
        "PBS_TASKNUM": "1",
        "PBS_VNODENUM": "0",
        "PBS_WALLTIME": str(want.walltime),
    }
    return found | ({"PBS_ARRAYID": task} if task else {})


def sealed_size(descriptor: int, most: int) -> int:
    """Seal a memfd against changes and return its size.

    Raises:
        UsageError: The memfd is larger than ``most`` bytes or cannot be sealed.
    """
    with name_errors("bad request", fault=UsageError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    size = os.fstat(descriptor).st_size
    if size > most:
        raise UsageError(f"script or environment has {size} bytes (limit: {most})")
    return size


def put_files(directory: Path, job: LocalJob, script: int, rest: int, host: str, ppn: int) -> None:
    """Create the job's directory with the script, the input of ``become_job`` and the node file.

    Root owns all files, so the job's owner cannot enlarge them.
    """
    Tree(str(directory)).create()
    content = _content(script)
    File(str(directory / f"{job.id}.SC"), mode=0o500, reader=job.uid, content=content).create()
    File(str(directory / "rest"), content=_content(rest)).create()
    File(str(directory / "nodes"), mode=0o444, content=f"{host}\n".encode() * ppn).create()


def keep_end(job: LocalJob, paths: Paths, host: str) -> None:
    """If the job has guests, write the reason of its end to its ``job.json`` and its log.

    Errors are ignored.
    """
    if not job.in_guest or not job.reason:
        return
    whose = JobAttempt(job.id, 0, job.hook[1], job.uid, host)
    place, now = kept_records.place(paths, whose), time.time()
    facts = place.facts()
    known = {name: facts[name] for name in ("name", "ended", "reason", "status") if name in facts}
    ended = {"name": job.name, "ended": now, "reason": job.reason, "status": str(job.status or 0)}
    kept_records.keep_facts(paths, whose, batch="local", **(ended | known))
    entry = {"t": now, "level": "ERROR", "plugin": "local", "node": host, "job": job.id}
    line = json.dumps(entry | {"message": f"ended: {job.reason}"}).encode() + b"\n"
    with contextlib.suppress(OSError, VtorqueError), os.fdopen(place.append(LOG), "ab") as log:
        log.write(line)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
