"""Whether a process stands still: by a signal, or in a frozen control group."""

from __future__ import annotations

from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def is_stopped(pid: int, proc: Path = _PROC, groups: Path = _GROUPS) -> bool:
    """Return whether it was stopped; not if it has ended. All is the kernel's word.

    By SIGSTOP its state is T (proc(5), /proc/PID/stat). A batch system may freeze its control group
    instead (cgroup.events of version 2; freezer.state of version 1: the kernel's
    admin-guide/cgroup-v2.rst and cgroup-v1/freezer-subsystem.rst). Names are users' bytes.
    """
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
        if stat.rpartition(b")")[2].split()[:1] == [b"T"]:
            return True
        lines = (proc / str(pid) / "cgroup").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return False
    return any(_is_frozen(line, groups) for line in lines)


def _is_frozen(line: str, groups: Path) -> bool:
    """Look at one group of a process: a line ``0::/path``, or ``7:freezer:/path``."""
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if number == "0":
        return b"frozen 1" in _said(groups / path.lstrip("/") / "cgroup.events")
    if "freezer" in controllers.split(","):
        return b"FROZEN" in _said(groups / "freezer" / path.lstrip("/") / "freezer.state")
    return False


def _said(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines()
    except OSError:
        return []
