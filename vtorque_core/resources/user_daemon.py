"""Run daemons that serve data of a job's owner to QEMU over a Unix socket, as that owner.

A daemon runs in a user namespace that root owns, so the user can neither trace nor change it. The
daemon is process 1 of a pid namespace, so killing it ends all its processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vtorque_core.api.acquired import RELEASE_TIME, CoreResource, unjournalled
from vtorque_core.api.children import wait_readable
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault, Refused, printable
from vtorque_core.base.locks import lock_holder, open_daemon_lock, try_flock
from vtorque_core.resources import _user_daemon_exec

if TYPE_CHECKING:
    from vtorque_core.api.guest_plan import JobUser

LOG_BYTES = 64 * 1024
MAX_MAP_LINES = 340  # user_namespaces(7), since Linux 4.15
MAX_SOCKET_PATH = 107  # unix(7): sun_path has 108 bytes with its end
_MAX_ID = 2**32 - 2  # chown(2) treats -1 as "do not change"
# Imported, because Python would compile a script again for every guest.
_HELPER = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from vtorque_core.resources import _user_daemon_exec; _user_daemon_exec.main()"
)
_FUSE = Path("/sys/fs/fuse/connections")
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class ServedData:
    """One daemon and the data that it serves. Paths are absolute, ids are host ids.

    Attributes:
        socket, lock, log: paths in directories that only root can write.
        uid, gid, groups: ids of the job's owner.
        socket_owner: uid of QEMU.
        subordinate_id: host id that the namespace maps for guest root, or None.
        owner_check: the source must belong to ``uid``.
        users_fault: Refused instead of HostFault if the source cannot be opened, or if the daemon
            does not answer. Only the owner's files and file systems should cause this.
    """

    source: str
    socket: str
    lock: str
    log: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    socket_owner: int
    subordinate_id: int | None = None
    readonly: bool = False
    nosuid: bool = False
    owner_check: bool = True
    users_fault: bool = False
    program: str = ""
    nofile: int = 1024

    @classmethod
    def at_stem(
        cls, stem: Path, source: str, user: JobUser, socket_owner: int, **more: Any
    ) -> Self:
        return cls(
            source=source, socket=f"{stem}.sock", lock=f"{stem}.lock", log=f"{stem}.log",
            uid=user.uid, gid=user.gid, groups=tuple(gid for _, gid in user.groups),
            socket_owner=socket_owner, **more,
        )  # fmt: skip

    @property
    def label(self) -> str:
        raise NotImplementedError

    @property
    def disk(self) -> str:
        """Format of the user's disk file, or empty: see :class:`_user_daemon_exec.DaemonPlan`."""
        return ""

    @property
    def user_is_root(self) -> bool:
        """True if the user's ids are 0 in the namespace."""
        return False

    def argv(self, socket_fd: int) -> tuple[str, ...]:
        """Return the command line. The caller replaces ``{source}`` by a descriptor's number."""
        raise NotImplementedError

    def start(self, *, timeout: float = 10.0) -> None:
        """Start the daemon, and wait until it serves on ``socket``. As root."""
        raise NotImplementedError


@dataclass(frozen=True)
class UserDaemon(CoreResource):
    blocking = True
    service: ServedData | None = unjournalled(None)
    lock: str = ""

    def __post_init__(self) -> None:
        if self.service is not None:
            object.__setattr__(self, "lock", self.service.lock)

    def create(self) -> None:
        if self.service is None:
            raise ValueError("the field 'service' is required to create a user's daemon")
        self.service.start()

    def release(self) -> None:
        stop(self.lock, time.monotonic() + RELEASE_TIME)


def id_map(subordinate_id: int | None, ids: Iterable[int], root: int | None = None) -> str:
    """Return the contents of uid_map or gid_map that map ``ids`` and ``subordinate_id``.

    Id 0 of the namespace maps to the host's id ``root``; if ``root`` is None, to
    ``subordinate_id``. All other given ids map to themselves. Adjacent ids share a line, because
    the kernel accepts at most 340 lines.
    """
    wanted = set(ids)
    subordinate = set() if subordinate_id is None else {subordinate_id}
    for number in sorted(wanted) + sorted(subordinate):
        if not 0 < number <= _MAX_ID:
            raise HostFault(f"a daemon cannot use uid or gid {number}: it must be 1 to {_MAX_ID}")
    if subordinate_id in wanted:
        raise HostFault(
            f"the subordinate id {subordinate_id} belongs to the job's user: use another id"
        )
    root = subordinate_id if root is None else root
    numbered = enumerate(sorted((wanted | subordinate) - {root}))
    runs = [list(run) for _, run in groupby(numbered, lambda each: each[1] - each[0])]
    lines = [] if root is None else [f"0 {root} 1"]
    lines += [f"{run[0][1]} {run[0][1]} {len(run)}" for run in runs]
    if len(lines) > MAX_MAP_LINES:
        raise HostFault(
            f"{len(wanted)} ids need {len(lines)} lines in gid_map; the limit is {MAX_MAP_LINES}"
        )
    return "\n".join(lines) + "\n"


def start(service: ServedData, ready: Callable[[bytes], bool], timeout: float) -> None:
    """Start the daemon, detached, and wait until ``ready`` accepts its log. As root.

    The daemon inherits cgroup, CPU affinity and limits. After a failure, ``service.log`` and the
    lock file remain; ``stop`` removes the lock file. Raises Refused if the user caused the failure.
    """
    # In the namespace, 0 is another group. Without root, groups are kept but cannot be mapped.
    groups = tuple(sorted(set(service.groups) - {0})) if os.geteuid() == 0 else ()
    root = (service.uid, service.gid) if service.user_is_root else (None, None)
    uid_map = id_map(service.subordinate_id, [service.uid], root[0])
    gid_map = id_map(service.subordinate_id, [service.gid, *groups], root[1])
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        lock_fd = _take_lock(service)
        stack.callback(os.close, lock_fd)
        listener = stack.enter_context(_listen(service))
        Path(service.log).unlink(missing_ok=True)
        log_fd = _create_log()
        stack.callback(os.close, log_fd)
        report, report_fd = os.pipe()
        stack.callback(os.close, report)
        same = ("uid", "gid", "source", "user_is_root", "owner_check", "readonly", "nosuid",
                "nofile", "users_fault")  # fmt: skip
        planned = _user_daemon_exec.DaemonPlan(
            **{name: getattr(service, name) for name in same},
            groups=groups,
            uid_map=uid_map,
            gid_map=gid_map,
            disk=service.disk,
            argv=service.argv(listener.fileno()),
            socket_fd=listener.fileno(),
            lock_fd=lock_fd,
            log_fd=log_fd,
            report_fd=report_fd,
            launched_by_root=os.geteuid() == 0,
        )
        try:
            _launch(planned, service.label, report, deadline)
            _await_ready(planned, ready, deadline)
        except BaseException:
            Path(service.socket).unlink(missing_ok=True)
            _save_log(log_fd, service.log)
            with contextlib.suppress(HostFault):  # the first fault says more; stop tries again
                while _kill_lock_holder(lock_fd, time.monotonic() + 1):
                    pass
            raise


def stop(lock_path: str, deadline: float) -> None:
    """Kill the daemon that holds ``lock_path``; remove its socket and lock file. As root.

    Idempotent, also after an incomplete ``start``. Saves the daemon's log to disk. Removes nothing
    if the daemon survives ``deadline`` (monotonic).
    """
    if (lock_fd := open_daemon_lock(lock_path)) is None:
        return
    with safefs.closing(lock_fd):
        record = _read_record(lock_fd)
        while not try_flock(lock_fd, fcntl.LOCK_EX, 0):
            killed = _kill_lock_holder(lock_fd, deadline, **record)
            if not killed and time.monotonic() >= deadline:
                raise HostFault(f"{lock_path} is held by a process that cannot be found")
            if not killed:
                time.sleep(0.005)  # a start in progress: its daemon takes the lock soon
        if "socket" in record:
            Path(record["socket"]).unlink(missing_ok=True)
        Path(lock_path).unlink(missing_ok=True)


def _take_lock(service: ServedData) -> int:
    """Return a read-only descriptor of the lock file, with a flock that the daemon inherits.

    The flock shows that the daemon is starting or alive. The daemon's own POSIX lock shows its pid.
    The file contains the paths of socket and log and the owner's uid for ``stop``.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with safefs.name_errors(f"a daemon's lock {service.lock}"):
        writer = os.open(service.lock, flags, 0o600)
    with os.fdopen(writer, "wb") as record:
        reader = os.open(service.lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not try_flock(reader, fcntl.LOCK_EX, 0):
            os.close(reader)
            raise HostFault(f"the daemon that holds {service.lock} already runs; end it first")
        record.truncate(0)
        same = {name: getattr(service, name) for name in ("socket", "log", "uid")}
        record.write(json.dumps(same).encode())
        return reader


def _read_record(lock_fd: int) -> dict[str, Any]:
    try:
        record = json.loads(os.pread(lock_fd, 65536, 0))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _listen(service: ServedData) -> socket.socket:
    if len(os.fsencode(service.socket)) > MAX_SOCKET_PATH:
        raise HostFault(f"{service.socket}: is longer than the limit of {MAX_SOCKET_PATH} bytes")
    with (
        safefs.name_errors(f"cannot create the socket {service.socket}"),
        socket.socket(socket.AF_UNIX) as listener,
    ):
        Path(service.socket).unlink(missing_ok=True)
        listener.bind(service.socket)
        # No connection is possible before listen(), so the order of these does not matter.
        Path(service.socket).chmod(0o600)
        os.chown(service.socket, service.socket_owner, -1, follow_symlinks=False)
        listener.listen(1)
        return listener.dup()


def _create_log() -> int:
    """Return a memfd limited to 64 KiB, because a guest can make the daemon write log lines."""
    log_fd = os.memfd_create("vtorque-daemon-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(log_fd, LOG_BYTES)
    fcntl.fcntl(log_fd, fcntl.F_ADD_SEALS, _SEALS)
    return log_fd


def _log_text(log_fd: int) -> bytes:
    return os.pread(log_fd, LOG_BYTES, 0).rstrip(b"\0")


def _save_log(log_fd: int, path: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError), os.fdopen(os.open(path, flags, 0o600), "wb") as target:
        target.write(_log_text(log_fd))


def _launch(plan: _user_daemon_exec.DaemonPlan, label: str, report: int, deadline: float) -> None:
    argv = [sys.executable, "-I", "-S", "-c", _HELPER, str(Path(__file__).parents[2])]
    argv.append(json.dumps(plan._asdict()))
    descriptors = (plan.socket_fd, plan.lock_fd, plan.log_fd, plan.report_fd)
    null = subprocess.DEVNULL
    with safefs.closing(plan.report_fd):
        helper = subprocess.Popen(
            argv, stdin=null, stdout=null, stderr=null, pass_fds=descriptors, env={}, cwd="/"
        )
    try:
        if not wait_readable([report], deadline - time.monotonic()):
            helper.kill()
            fault = Refused if plan.users_fault else HostFault
            raise fault(f"{label}: the daemon does not answer")
        if problem := os.read(report, 4096):
            reason = printable(problem.decode("utf-8", "replace"))
            if reason.startswith(_user_daemon_exec.DENIED):
                raise Refused(f"{label}: {reason.removeprefix(_user_daemon_exec.DENIED)}")
            raise HostFault(f"{label}: {reason}")
    finally:  # a process that reports waits for its child and ends
        try:
            helper.wait(1)
        except subprocess.TimeoutExpired:  # hangs in a system call on a dead server
            helper.kill()


def _await_ready(
    plan: _user_daemon_exec.DaemonPlan, ready: Callable[[bytes], bool], deadline: float
) -> None:
    while lock_holder(plan.lock_fd) and time.monotonic() < deadline:
        if ready(_log_text(plan.log_fd)):
            return
        time.sleep(0.002)
    last = _log_text(plan.log_fd).decode("utf-8", "replace").strip().rpartition("\n")[2]
    # Only the daemon of a qcow2 file parses the file. A hung file system may be the node's fault.
    parsed = plan.disk == "qcow2" and (last or not lock_holder(plan.lock_fd))
    error = Refused if plan.users_fault or parsed else HostFault
    raise error(f"{plan.argv[0]} for {plan.source} did not start: {printable(last)}")


def _kill_lock_holder(
    lock_fd: int, deadline: float, log: str = "", uid: int = -1, **_: str
) -> bool:
    pid = lock_holder(lock_fd)
    if not pid or pid < 0:  # negative: not a process of this machine
        return False
    # Suppressed: it has ended.
    with contextlib.suppress(ProcessLookupError), safefs.closing(os.pidfd_open(pid)) as pidfd:
        if lock_holder(lock_fd) != pid:
            return True  # it has ended, and the pidfd may be of another process
        if log:
            _save_log_of(pidfd, log)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not wait_readable([pidfd], (deadline - time.monotonic()) / 2):
            _end_requests(uid)
        if not wait_readable([pidfd], deadline - time.monotonic()):
            raise HostFault(f"the daemon with pid {pid} does not exit after SIGKILL")
    return True


def _end_requests(uid: int) -> None:
    """Disconnect the FUSE file systems of a user that owe an answer (fuse.rst of the kernel).

    SIGKILL does not end a process that waits for a FUSE server, so a user could keep a killed
    daemon, and the cores and memory of its job, for any time.
    """
    for waiting in _FUSE.glob("*/waiting"):
        with contextlib.suppress(OSError):  # the file system is gone
            if waiting.stat().st_uid == uid and waiting.read_bytes() != b"0\n":
                waiting.with_name("abort").write_bytes(b"1")


def _save_log_of(pidfd: int, path: str) -> None:
    of_daemon = _user_daemon_exec.descriptor_of
    with contextlib.suppress(OSError), safefs.closing(of_daemon(pidfd, 2)) as log_fd:
        # Only a memfd has these seals: reading another file could hang or read the user's home.
        if fcntl.fcntl(log_fd, fcntl.F_GET_SEALS) == _SEALS:
            _save_log(log_fd, path)
