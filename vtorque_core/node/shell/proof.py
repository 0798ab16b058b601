"""Proof file, in which root tells the job shell that the guests are ready, or why not.

Root writes it below ``<run>/proof``: a JSON object with the fields of :class:`Proof`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from vtorque_core.api.children import wait_readable
from vtorque_core.api.guest_driver import ReadyGuest
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import try_flock
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config.values import convert

SCHEMA = 4
POLL = 0.02  # seconds between two reads of a proof, or two tests of its lock
MAX_BYTES = 4 << 20  # of one proof file; guests and environment fit well
MAX_FILE = 4 << 20  # of one of the user's files; a request is smaller
USER_FILES = ("vm_prologue", "vm_epilogue")
State = Literal["starting", "ready", "refused", "host_fault", "requeued"]


@dataclass(frozen=True)
class Proof:
    """Status file from the prologue (root) to the job shell (user).

    Args:
        state: ``starting``: the job shell waits. ``ready``: the job shell runs the script.
            ``requeued``: the job shell locks the proof, and waits until the batch system ends the
            job.
        reason: one line for the user; empty if ready.
        detail: more lines for the user; notices and warnings if ready.
        deadline: of the start, in seconds of CLOCK_MONOTONIC (clock_gettime(2)).
        starter: pid of the process that starts the guests; 0: unknown.
        namespace: the starter's pid namespace, as inode of ``/proc/self/ns/pid`` (namespaces(7)).
        nodes: names of the job's nodes with guests, by rank.
        grace: seconds between SIGTERM and SIGKILL.
        shell: the user's ``-S``.
        files: SHA-256 of each of the job's :data:`USER_FILES`.
        unless: maps a variable in ``environ`` to other names. The script does not get the variable
            if the user has set one of these names.
    """

    job: JobAttempt
    state: State
    reason: str = ""
    deadline: float = 0.0
    starter: int = 0
    namespace: int = 0
    nodes: tuple[str, ...] = ()
    guest_type: str = ""
    plugin: str = ""
    off: tuple[str, ...] = ()
    grace: float = 10.0
    shell: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    keep: bool = False
    show_log: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    unless: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    guests: tuple[ReadyGuest, ...] = ()
    detail: tuple[str, ...] = ()

    def command_environ(self, given: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in self.environ.items()
            if given.keys().isdisjoint(self.unless.get(name, ()))
        }

    def starter_has_ended(self) -> bool:
        if self.starter == 0 or self.namespace != pid_namespace():
            return False
        try:
            handle = os.pidfd_open(self.starter)
        except OSError as error:
            return error.errno == errno.ESRCH
        with safefs.closing(handle):
            return bool(wait_readable([handle], 0))

    def encode(self) -> bytes:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, default=str).encode()  # a Path

    @classmethod
    def decode(cls, data: bytes) -> Proof:
        try:
            document = json.loads(data)
            if document.pop("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            missing = {f.name for f in fields(cls)} - set(document)
            if missing:
                raise ValueError(f"it lacks the fields {', '.join(sorted(missing))}")
            proof: Proof = convert(cls, document)
            whose = (proof.job.uid, proof.job.attempt, proof.starter, proof.namespace)
            if min(*whose, proof.grace, proof.deadline, *(g.rank for g in proof.guests)) < 0:
                raise ValueError("a number is negative")
            if unknown := set(proof.files) - set(USER_FILES):
                raise ValueError(f"its field files has the unknown name {min(unknown)!r}")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a proof: {error}") from None
        return proof


def pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def write(paths: Paths, proof: Proof, gid: int = -1) -> None:
    """Replace the job's proof atomically. As root.

    Only root and ``gid``, the owner's primary group, can read the proof, because it may contain
    plugins' variables and the end of a console. Only root can write or list the directory (0711).
    """
    target = paths.proof(proof.job.id)
    target.parent.mkdir(mode=0o711, exist_ok=True)
    safefs.replace(str(target), proof.encode(), mode=0o640, gid=gid)


def remove(paths: Paths, job_id: str) -> None:
    path = str(paths.proof(job_id))
    for each in (path, safefs.temporary_name(path)):
        safefs.remove_file(each)


def read(paths: Paths, job_id: str, uid: int, owner_uid: int = 0) -> Proof | None:
    """Return the proof of the caller's job, or None if it does not exist. As the job's owner.

    ``owner_uid`` (0 except in tests) must own the file and its directories. Raises HostFault if the
    proof is unreadable, invalid, or of another job or user.
    """
    target = paths.proof(job_id)
    with safefs.name_errors(target, stage="proof"):
        try:
            for directory in (target.parent.parent, target.parent):
                _check_owner(directory, directory.lstat(), owner_uid, stat.S_ISDIR)
            # O_NONBLOCK: opening a FIFO would wait for ever, open(2).
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(target, flags)
        except FileNotFoundError:
            return None
    with os.fdopen(descriptor, "rb") as file:
        _check_owner(target, os.fstat(descriptor), owner_uid, stat.S_ISREG)
        data = file.read(MAX_BYTES + 1)
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES} bytes")
        proof = Proof.decode(data)
    except ValueError as error:
        raise HostFault(f"{target}: {error}", stage="proof") from None
    whose = proof.job
    if whose.id != job_id or whose.uid != uid:
        raise HostFault(
            f"{target} belongs to job {whose.id!r} of uid {whose.uid}, "
            f"not to job {job_id!r} of uid {uid}",
            stage="proof",
        )
    return proof


def is_current(paths: Paths, proof: Proof) -> bool:
    try:
        return paths.proof(proof.job.id).read_bytes() == proof.encode()
    except FileNotFoundError:
        return False


def starter_pid(paths: Paths, job_id: str) -> int:
    """Return the pid of the process that starts the job's guests, or 0.

    If that process has ended, the pid may belong to another process.
    """
    try:
        proof = Proof.decode(paths.proof(job_id).read_bytes())
    except (OSError, ValueError):
        return 0
    is_starting = proof.state == "starting" and proof.namespace == pid_namespace()
    return proof.starter if is_starting else 0


def lock(paths: Paths, job_id: str) -> bool:
    """Lock the job's proof until this process ends; return True on success.

    Uses flock(2): a lock of fcntl(2) would end when this process closes the file after a read.
    """
    try:
        descriptor = os.open(paths.proof(job_id), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    if try_flock(descriptor, fcntl.LOCK_SH, 0.0):
        return True
    os.close(descriptor)  # root is testing the lock
    return False


def await_lock(paths: Paths, proof: Proof, seconds: float) -> bool:
    """Return True if a job shell locks this proof within ``seconds``.

    Returns False once the proof's file is replaced or removed. The job's owner controls the lock,
    so treat the result as untrusted input.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and is_current(paths, proof):
        with contextlib.suppress(FileNotFoundError), paths.proof(proof.job.id).open("rb") as file:
            if not try_flock(file.fileno(), fcntl.LOCK_EX, 0.0):
                return True
        time.sleep(POLL)
    return False


def user_file_path(paths: Paths, job: JobAttempt, name: str) -> Path:
    return paths.job_run(job.key) / name


def user_file(paths: Paths, proof: Proof, name: str) -> bytes | None:
    """Return the content of one of :data:`USER_FILES`, or None if the job has no such file.

    Raises HostFault if its checksum is wrong.
    """
    if name not in proof.files:
        return None
    path = user_file_path(paths, proof.job, name)
    with safefs.name_errors(path, stage="proof"):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise HostFault(f"{path} is not a regular file", stage="proof")
            content = file.read(MAX_FILE + 1)
    if digest(content) != proof.files[name]:
        raise HostFault(f"{path} was changed: its hash does not match root's proof", stage="proof")
    return content


def digest(content: bytes) -> str:
    import hashlib  # noqa: PLC0415 - few jobs have such files

    return hashlib.sha256(content).hexdigest()


def _check_owner(path: Path, status: os.stat_result, owner_uid: int, is_kind: Any) -> None:
    if not is_kind(status.st_mode):
        raise HostFault(f"{path} has the wrong type (is it a symbolic link?)", stage="proof")
    if status.st_uid != owner_uid:
        raise HostFault(f"{path} belongs to uid {status.st_uid}, not {owner_uid}", stage="proof")
    if status.st_mode & 0o022:
        raise HostFault(f"{path} can be written by others than its owner", stage="proof")
