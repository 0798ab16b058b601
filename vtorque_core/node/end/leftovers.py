"""Kill processes that a job's owner leaves on a node that ran no other jobs. As root.

The owner's uid is from the journal, which users cannot write.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.base import safefs
from vtorque_core.base.names import Paths, boot_id
from vtorque_core.records.reading import JobHeader, JournalError, walk

LEAST_UID = 1000
"""Lowest uid of ordinary users (Debian Policy, 9.2.2)."""
SESSIONS = Path("/run/systemd/users")
_SECONDS = 5.0  # limit against a user who forks faster than this kills


def kill(paths: Paths, job: JobHeader) -> str:
    """Kill the processes of the job's owner, and return a line for the log (empty: nothing to do).

    Does nothing if the node could run other jobs, or was rebooted. If the owner is logged in or has
    another job on this node, kills nothing and returns a message.
    """
    if not job.whole_node or job.job.uid < LEAST_UID or job.boot != boot_id():
        return ""
    if not any(_processes(job.job.uid)):
        return ""
    why = _spare_reason(paths, job)
    if why:
        return f"{job.job.id}: processes of {job.job.owner} are not killed: {why}"
    killed: set[int] = set()
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        found = list(_processes(job.job.uid))
        if not found:
            break
        for pid in found:
            if _kill(pid, job.job.uid):
                killed.add(pid)
        time.sleep(0.02)
    left = sum(1 for _ in _processes(job.job.uid))
    rest = f"; {left} did not exit" if left else ""
    return f"{job.job.id}: {len(killed)} leftover processes of {job.job.owner} killed{rest}"


def _spare_reason(paths: Paths, job: JobHeader) -> str:
    try:
        others = [state.header for state in walk(paths) if state.header.job.id != job.job.id]
    except JournalError as error:
        return str(error)
    mine = next((other.job.id for other in others if other.job.uid == job.job.uid), None)
    if mine is not None:
        return f"the user has job {mine} on this node, too"
    if (SESSIONS / str(job.job.uid)).exists():
        return "the user has a login session or a user manager (loginctl)"
    try:
        who = subprocess.run(["who"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot determine who is logged in: {error}"
    if any(line.split(" ", 1)[0] == job.job.owner for line in who.stdout.splitlines()):
        return "the user is logged in (who)"
    return ""


def _processes(uid: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _belongs_to(entry.name, uid):
            yield int(entry.name)


def _belongs_to(pid: str | int, uid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    ids = lines.get("Uid", "").split()
    return ids == [str(uid)] * 4 and not lines.get("State", "Z").strip().startswith(("Z", "X"))


def _kill(pid: int, uid: int) -> bool:
    with contextlib.suppress(OSError), safefs.closing(os.pidfd_open(pid)) as handle:
        if _belongs_to(pid, uid):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
    return False
