"""Kill daemons that serve a user's files but are stopped (SIGSTOP): they would block libvirtd.

QEMU does a handshake with each daemon before the guest runs, and when the guest is paused. Each
handshake occupies one of libvirtd's few workers, for ever if the user has sent SIGSTOP.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.locks import holder_of
from vtorque_core.resources import user_daemon

HANDSHAKE = 30.0  # seconds for all daemons of a guest together; half of what its start may take
_POLL = 0.02  # seconds; there is no event when a process that is not a child stops


def locks_of(run_dir: Path) -> list[str]:
    return [str(lock) for kind in ("fs", "disk") for lock in run_dir.glob(f"{kind}-*.lock")]


@contextlib.contextmanager
def kill_stopped(
    locks: Sequence[str],
    seconds: float | None = None,
    error_type: type[HostFault | Refused] = HostFault,
) -> Iterator[None]:
    """During a ``with`` block, kill daemons that hold ``locks`` if SIGSTOP or a freezer stops them.

    After ``seconds`` (default: HANDSHAKE), kill all holders of ``locks``, stopped or not, because
    a daemon that waits for a file system blocks libvirtd, too. Raises ``error_type`` after a kill.
    """
    over = threading.Event()
    found: dict[str, bool] = {}  # True: it was stopped
    seconds = HANDSHAKE if seconds is None else seconds
    until = time.monotonic() + seconds

    def watch() -> None:
        while not over.wait(_POLL):
            late = time.monotonic() > until
            for lock in [
                lock for lock in locks if _is_stopped(lock) or (late and lock not in found)
            ]:
                found.setdefault(lock, not late)
                with contextlib.suppress(HostFault):  # its release reports it
                    user_daemon.stop(lock, time.monotonic() + 1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    fault: HostFault | None = None
    try:
        yield
    except HostFault as error:
        fault = error
    finally:
        over.set()
        watcher.join()
    if found:
        names = ", ".join(Path(lock).stem for lock in found)
        raise error_type(
            f"a process of yours stopped (SIGSTOP) the daemon that serves your files to the guest "
            f"({names}) while QEMU waited for it, so vTorque killed the daemon: submit the job "
            "again, and do not stop processes that you did not start"
            if any(found.values())
            else f"the daemon that serves your files to the guest ({names}) did not answer within "
            f"{seconds:.3g} s while QEMU waited for it, so vTorque killed the daemon: check that "
            "the file systems of your directories and disks respond on this node"
        ) from fault
    if fault is not None:
        raise fault


def _is_stopped(lock: str) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        pid = holder_of(lock)
        return pid is not None and is_stopped(pid)
    return False


_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def is_stopped(pid: int, proc: Path = _PROC, groups: Path = _GROUPS) -> bool:
    """Return True if the kernel reports the process as stopped or frozen.

    State T in /proc/PID/stat (proc(5)) means SIGSTOP. A batch system may freeze the control group
    instead (cgroup-v2.rst and freezer-subsystem.rst of the kernel).
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
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if number == "0":
        return b"frozen 1" in _read_lines(groups / path.lstrip("/") / "cgroup.events")
    if "freezer" in controllers.split(","):
        return b"FROZEN" in _read_lines(groups / "freezer" / path.lstrip("/") / "freezer.state")
    return False


def _read_lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines()
    except OSError:
        return []
