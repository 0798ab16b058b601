"""Kill the processes that a job has left on the machine.

The service kills the processes in the job's cgroup. If the job has no cgroup, the processes with
the job's ``PBS_JOBCOOKIE`` must be found in ``/proc``. Reading ``/proc/PID`` can block forever if
the memory of process PID belongs to a FUSE file system. Therefore not the
service but a process of the job's user finds and kills these processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

COOKIE = "PBS_JOBCOOKIE"  # in the environment of a job's processes; unique for each job
KILL_TIME = 10.0  # seconds to find and kill a job's processes
_JOIN = 'echo 0 >"$1" || exit 1; shift; exec "$@"'
_MOUNT = re.compile(r"\S+ \S+ \S+ \S+ (\S+) .* - (cgroup2?) \S+ (\S+)")
_AT_ONCE = 256  # processes; each needs a descriptor
_POLL = 0.02  # seconds; cgroup v1 has no event for an empty cgroup


def make_cgroup(name: str, pids: int) -> str:
    """Create a cgroup below the cgroup of this process. Return the new directory, or "" on errors.

    Tries cgroups version 2, then the version 1 hierarchies "pids" and "systemd" (cgroups(7)). Uses
    the first hierarchy that can limit the number of processes and threads to the parameter ``pids``
    (0 means no limit), otherwise the first writable hierarchy. ``name`` must be unique.
    """
    without = ""
    for top in _own_cgroups():
        path = top / f"vtorque-{name}"
        try:
            path.mkdir()
        except OSError:
            continue
        usable = os.access(path / "cgroup.procs", os.W_OK)
        if usable and (not pids or _is_limited(path, pids)):
            _remove(without)
            return str(path)
        if usable and not without:
            without = str(path)
        else:
            _remove(str(path))
    return without


def _is_limited(path: Path, pids: int) -> bool:
    with contextlib.suppress(OSError):  # version 2: the parent must enable the controller
        control = path.parent / "cgroup.subtree_control"
        if control.exists():
            control.write_text("+pids")
            # A cgroup whose parent contains processes accepts no processes (cgroups(7), threads).
            if (path / "cgroup.type").read_text() != "domain\n":
                control.write_text("-pids")
                return False
    try:
        os.close(os.open(path / "pids.max", os.O_WRONLY))
        (path / "pids.max").write_text(str(pids))
    except OSError:
        return False
    return True


def _remove(cgroup: str) -> None:
    if cgroup:
        with contextlib.suppress(OSError):
            Path(cgroup).rmdir()


def _own_cgroups() -> Iterable[Path]:
    own = {
        line.split(":")[1]: line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
    }
    for kind in ("", "pids", "name=systemd"):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            found = _MOUNT.fullmatch(line)
            if found and kind in own and _is_hierarchy(kind, found[2], found[3].split(",")):
                yield Path(found[1] + own[kind])


def _is_hierarchy(kind: str, system: str, options: Sequence[str]) -> bool:
    return system == "cgroup2" if not kind else system == "cgroup" and kind in options


def join_command(cgroup: str) -> list[str]:
    """Return a command prefix that runs another command in the cgroup. Privileges: root."""
    return ["/bin/sh", "-c", _JOIN, "sh", f"{cgroup}/cgroup.procs"] if cgroup else []


def join(cgroup: str, pid: int) -> None:
    """Move a process, and its future children, to the cgroup. Raise OSError if impossible."""
    Path(cgroup, "cgroup.procs").write_text(str(pid))


def members(cgroup: str) -> set[int]:
    """Return the processes in the cgroup; none if the cgroup does not exist."""
    with contextlib.suppress(OSError):
        return {int(pid) for pid in Path(cgroup, "cgroup.procs").read_text().split()}
    return set()


def end_members(cgroup: str, grace: float, spared: int = 0) -> bool:
    """Wait ``grace`` seconds for the cgroup's processes, kill the rest, and remove the cgroup.

    The process ``spared`` is not killed, but moved to the parent cgroup. Returns False if another
    process is still alive ``KILL_TIME`` seconds after SIGKILL.
    """
    kill_at = time.monotonic() + grace
    while left := members(cgroup) - {spared}:
        now = time.monotonic()
        if now >= kill_at + KILL_TIME:
            return False
        if now >= kill_at:
            _kill(left, cgroup)
        time.sleep(_POLL)
    with contextlib.suppress(OSError):  # ``spared`` has ended, or a process has joined
        if spared in members(cgroup):
            join(str(Path(cgroup).parent), spared)
        Path(cgroup).rmdir()
    return True


def _kill(pids: set[int], cgroup: str) -> None:
    handles = {}
    for pid in list(pids)[:_AT_ONCE]:
        with contextlib.suppress(OSError):
            handles[pid] = os.pidfd_open(pid)
    there = members(cgroup)  # read again: pids may have been reused
    for pid, handle in handles.items():
        with contextlib.suppress(OSError):
            if pid in there:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def ending_marked(cookie: str, grace: float) -> list[str]:
    """Return a command that ends the processes with this PBS_JOBCOOKIE, like :func:`end_members`.

    Privileges: the processes' user.
    """
    return [sys.executable, "-I", "-S", __file__, cookie, str(grace)]


def _find_by_cookie(cookie: str) -> set[int]:
    mark, found = f"{COOKIE}={cookie}".encode(), set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - numbers
        if name.isdecimal():
            with contextlib.suppress(OSError):  # the process has ended
                if Path("/proc", name).stat().st_uid != os.geteuid():
                    continue  # otherwise users could block root's jobs
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.add(int(name))
    return found


def _end_marked(cookie: str, grace: float) -> None:
    kill_at = time.monotonic() + grace
    end = kill_at + KILL_TIME  # a job may fork faster than this finds its processes
    while (left := _find_by_cookie(cookie)) and time.monotonic() < end:
        if time.monotonic() >= kill_at:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL)


if __name__ == "__main__":
    _end_marked(sys.argv[1], float(sys.argv[2]))
