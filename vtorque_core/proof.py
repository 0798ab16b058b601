"""The proof file: root's word to the job wrapper that the guests are ready, or why they are not.

Root writes it on the node, below ``<run>/proof``; the wrapper reads it as the job's user. Without
a proof that root alone can have written no script runs. Format: JSON (RFC 8259), one object with
the fields of :class:`Proof`; bytes are base64 (RFC 4648, 4).
"""

from __future__ import annotations

import base64
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vtorque_core.errors import HostFault
from vtorque_core.names import Paths

SCHEMA = 1
MAX_BYTES = 4 << 20  # of one proof file; guests, environment and the user's two scripts fit well
STATES = ("starting", "ready", "refused", "host_fault")
State = Literal["starting", "ready", "refused", "host_fault"]


@dataclass(frozen=True)
class ProofGuest:
    """One guest of the job; ``run_dir`` has its sockets."""

    name: str
    hostname: str
    rank: int
    run_dir: str


@dataclass(frozen=True)
class Proof:
    """What root tells the wrapper.

    Args:
        state: the wrapper waits on ``starting`` and runs the script on ``ready`` only.
        reason: one line for the user, unless ready; ``detail``: lines after it, printable.
        deadline: unix time when ``starting`` must have ended.
        guest_type, plugin: whose driver runs the script.
        grace: seconds between TERM and KILL.
        shell: the user's own ``-S``.
        prologue, epilogue: the user's ``vm_prologue`` and ``vm_epilogue``.
        keep: the guests stay after the script, for inspection, until the job is ended.
        environ: what the script's environment has besides the batch system's.
        guests: in rank order.
    """

    job: str
    attempt: int
    uid: int
    state: State
    reason: str = ""
    deadline: float = 0.0
    guest_type: str = ""
    plugin: str = ""
    grace: float = 10.0
    shell: str | None = None
    prologue: bytes | None = None
    epilogue: bytes | None = None
    keep: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    guests: tuple[ProofGuest, ...] = ()
    detail: tuple[str, ...] = ()

    @classmethod
    def failed(
        cls, job: str, attempt: int, uid: int, state: str, reason: str, detail: tuple[str, ...] = ()
    ) -> Proof:
        """Return the proof of a start that has failed: ``refused`` or ``host_fault``."""
        word: State = "refused" if state == "refused" else "host_fault"
        return cls(job, attempt, uid, word, reason, detail=detail)

    def encode(self) -> bytes:
        """Return the file's content."""
        document = asdict(self) | {"schema": SCHEMA}
        for key in ("prologue", "epilogue"):
            data = document[key]
            document[key] = None if data is None else base64.b64encode(data).decode()
        return json.dumps(document).encode()

    @classmethod
    def decode(cls, data: bytes) -> Proof:
        """Read a file's content. Raises ValueError for anything that is not a whole proof."""
        try:
            return _from_document(json.loads(data))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a proof: {type(error).__name__} {error}") from None


def write(paths: Paths, proof: Proof, gid: int | None = None) -> None:
    """Put the proof in place of an older one, atomically. As root, on the node.

    Args:
        paths: vTorque's directories; the proof's is created (0755) if it is missing.
        proof: what to say.
        gid: the job user's primary group: the file is then readable by that group only (0640),
            since ``vm_prologue`` is the user's own; without it by everyone (0644).

    The directory is root's alone, so that the names in it are. Raises OSError.
    """
    target = paths.proof(proof.job)
    target.parent.mkdir(mode=0o755, exist_ok=True)
    new = _beside(target)
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(proof.encode())
            file.flush()
            if gid is not None:
                os.fchown(descriptor, -1, gid)
            os.fchmod(descriptor, 0o644 if gid is None else 0o640)
        new.replace(target)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def remove(paths: Paths, job_id: str) -> None:
    """Take the job's proof away; nothing happens if there is none. As root."""
    for path in (paths.proof(job_id), _beside(paths.proof(job_id))):
        path.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    """Return where :func:`write` writes first: always the same, so that a kill leaves no stray.

    It is the name that releasing the proof's journal record clears too (``safefs.beside``).
    """
    return target.with_name(f"{target.name}.new")


def read(paths: Paths, job_id: str, uid: int, owner_uid: int = 0) -> Proof | None:
    """Return the proof of this user's job; None if there is none. As the job's user.

    Args:
        paths: vTorque's directories.
        job_id: as the batch system has it.
        uid: the job's owner, that is the caller.
        owner_uid: who must have written it: root, except in tests.

    Raises HostFault, naming the file, for one that is not to be believed: it, its directory or
    the one above belongs to someone else or others can write there; wrong job or user; damaged.
    """
    target = paths.proof(job_id)
    try:
        for directory in (target.parent.parent, target.parent):
            _check_owner(directory, directory.lstat(), owner_uid, stat.S_ISDIR)
        # O_NONBLOCK: opening a FIFO would wait for ever, open(2).
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(target, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostFault(f"{target}: {error.strerror}", stage="proof") from None
    with os.fdopen(descriptor, "rb") as file:
        _check_owner(target, os.fstat(descriptor), owner_uid, stat.S_ISREG)
        data = file.read(MAX_BYTES + 1)
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        proof = Proof.decode(data)
    except ValueError as error:
        raise HostFault(f"{target}: {error}", stage="proof") from None
    if proof.job != job_id or proof.uid != uid:
        raise HostFault(
            f"{target} is of job {proof.job!r} of uid {proof.uid}, "
            f"not of job {job_id!r} of uid {uid}",
            stage="proof",
        )
    return proof


def _check_owner(path: Path, status: os.stat_result, owner_uid: int, is_kind: Any) -> None:
    if not is_kind(status.st_mode):
        raise HostFault(f"{path} is not what it should be (a symbolic link?)", stage="proof")
    if status.st_uid != owner_uid:
        raise HostFault(f"{path} belongs to uid {status.st_uid}, not {owner_uid}", stage="proof")
    if status.st_mode & 0o022:
        raise HostFault(f"{path} can be written by others than its owner", stage="proof")


def _from_document(document: Any) -> Proof:
    if not isinstance(document, dict) or document["schema"] != SCHEMA:
        raise ValueError(f"not a proof of schema {SCHEMA}")
    if document["state"] not in STATES:
        raise ValueError(f"unknown state {document['state']!r}")
    guests = document["guests"]
    environ = document["environ"]
    detail = document["detail"]
    if not all(isinstance(each, list) for each in (guests, detail)):
        raise ValueError("guests or detail is no list")
    if not isinstance(environ, dict):
        raise ValueError("environ is no object")
    return Proof(
        job=_text(document["job"]),
        attempt=_number(document["attempt"]),
        uid=_number(document["uid"]),
        state=document["state"],
        reason=_text(document["reason"]),
        deadline=_seconds(document["deadline"]),
        guest_type=_text(document["guest_type"]),
        plugin=_text(document["plugin"]),
        grace=_seconds(document["grace"]),
        shell=None if document["shell"] is None else _text(document["shell"]),
        prologue=_bytes(document["prologue"]),
        epilogue=_bytes(document["epilogue"]),
        keep=document["keep"] is True,
        environ={_text(name): _text(value) for name, value in environ.items()},
        guests=tuple(_guest(guest) for guest in guests),
        detail=tuple(_text(line) for line in detail),
    )


def _guest(guest: Any) -> ProofGuest:
    if not isinstance(guest, dict):
        raise ValueError("a guest is no object")
    rank, run_dir = _number(guest["rank"]), _text(guest["run_dir"])
    return ProofGuest(_text(guest["name"]), _text(guest["hostname"]), rank, run_dir)


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{str(value)[:40]!r} is not text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a time in seconds")
    return float(value)


def _bytes(value: Any) -> bytes | None:
    return None if value is None else base64.b64decode(_text(value), validate=True)
