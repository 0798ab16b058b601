"""Request files ``~/.vtorque/requests/<job>/<name>.json``, which a process of the job reads.

Guests share the owner's home, so code in a guest can write requests. Therefore a request can only
run what a user in a guest may run anyway (:func:`parse_request`); see doc/security.md. Root reads
no requests.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pwd
import re
import secrets
import stat
import time
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import JobAttempt, Refused, printable
from vtorque_login.channel import KEY

MAX_BYTES = 1 << 17  # maximum size of a request
MAX_WORDS = 1000
_LONGEST = 86400.0  # maximum seconds until a request expires
_PLACE = (".vtorque", "requests")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_COMMAND = re.compile(r"[a-z]{1,20}")
_OPTION = re.compile(r"--([a-z][a-z-]{0,30})(=[A-Za-z0-9_.:,+-]{0,64})?")
_NODE = re.compile(r"[A-Za-z0-9._-]{0,255}")
_TERM = re.compile(r"[A-Za-z0-9+._-]{1,40}")
_NAME = re.compile(r"[0-9a-f]{32}\.json")


@dataclass(frozen=True)
class LoginRequest:
    """A request about a job, from a command that waits for the answer on a submit host.

    Attributes:
        words: Command line of vmgr: command, options, ``--``, the job, operands.
        node: Node of the job; empty for the first.
        term: TERM of the user's terminal; empty without a terminal.
        host: IP address of the host on which the command waits.
        key: Key that authenticates both sides of the connection, hexadecimal.
        expires: Unix seconds by the clock of the waiting host.
    """

    words: tuple[str, ...]
    node: str
    term: str
    rows: int
    columns: int
    host: str
    port: int
    key: str
    expires: float


def parse_request(data: bytes, job_id: str) -> LoginRequest:
    """Parse and validate a request for this job.

    The words of a request are a vTorque command, its options, ``--``, the job id, and words that
    are passed to the guest unchecked. The options must be long options with plain values that the
    command accepts from other hosts (``Remote``). ``--config`` is rejected, because a config
    determines what commands do.
    """
    try:
        found = json.loads(data)
        request = LoginRequest(**found | {"words": tuple(found["words"])})
        _check(request, job_id)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused(f"invalid request: {printable(str(error))}") from None
    return request


def _check(request: LoginRequest, job_id: str) -> None:
    for name, kind in LoginRequest.__annotations__.items():
        wanted: Any = {"str": str, "int": int, "float": (int, float)}.get(kind, tuple)
        value = getattr(request, name)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"the field {name!r} is not a {kind}")
    words = request.words
    if len(words) > MAX_WORDS or any(type(word) is not str or "\0" in word for word in words):
        raise ValueError("the field 'words' is not a command line")
    middle = words.index("--")
    if not _COMMAND.fullmatch(words[0]) or words[middle + 1 : middle + 2] != (job_id,):
        raise ValueError("the field 'words' is not a command for this job")
    for word in words[1:middle]:
        match = _OPTION.fullmatch(word)
        if match is None or match[1] == "config":
            raise ValueError(f"option {word} is not allowed")
    if not _NODE.fullmatch(request.node):
        raise ValueError("the field 'node' is not a valid node name")
    if request.term and not _TERM.fullmatch(request.term):
        raise ValueError("the field 'term' is not a valid terminal name")
    if not (0 <= request.rows < 1 << 16 and 0 <= request.columns < 1 << 16):
        raise ValueError("invalid terminal size")
    if not 1024 <= request.port < 1 << 16:
        raise ValueError(f"port {request.port} is invalid: no command listens there")
    if len(bytes.fromhex(request.key)) != KEY:
        raise ValueError("the field 'key' does not have 256 bits")
    now = time.time()
    if not now <= request.expires <= now + _LONGEST:  # also rejects NaN
        raise ValueError(
            "the request has expired, is valid for more than a day, or the clocks differ"
        )


def is_other_host(address: str) -> bool:
    """Return whether the text is an IP address that may belong to another host."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    inside = found.is_loopback or found.is_unspecified or found.is_link_local
    return not (inside or found.is_multicast or found.is_reserved)


@contextlib.contextmanager
def directory(job_id: str) -> Iterator[int]:
    """Yield a descriptor of a job's request directory, created if missing. Privileges: the user.

    NFS caches directories for up to a minute. The chmod in this function makes the kernel query the
    NFS server again.

    Raises:
        Refused: The directory belongs to another user.
    """
    job = _name(job_id)
    here = os.open(pwd.getpwuid(os.getuid()).pw_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in (*_PLACE, job):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=here)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=here)
            os.close(here)
            here = below
            if os.fstat(here).st_uid != os.getuid():
                raise Refused(
                    f"~/{'/'.join(_PLACE)}/{job}: {name} belongs to another user: remove it"
                )
        os.fchmod(here, 0o700)
        yield here
    finally:
        os.close(here)


def remove(job_id: str) -> None:
    """Remove an ended job's request directory and the files in it."""
    with directory(job_id) as place, os.scandir(place) as entries:
        for entry in entries:
            os.unlink(entry.name, dir_fd=place)
    remove_empty(job_id)


def remove_empty(job_id: str) -> None:
    """Remove a job's request directory if the directory is empty. Never raises OSError."""
    with contextlib.suppress(OSError):
        Path(pwd.getpwuid(os.getuid()).pw_dir, *_PLACE, _name(job_id)).rmdir()


def _name(job_id: str) -> str:
    """Return a safe file name for any job id."""
    return JobAttempt(job_id, 0, "", os.getuid()).key


def write_request(place: int, request: LoginRequest) -> str:
    """Write a request atomically, readable by the user only, and return its name."""
    name = f"{secrets.token_hex(16)}.json"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
    with os.fdopen(os.open(f".{name}", flags, 0o600, dir_fd=place), "wb") as file:
        file.write(json.dumps(asdict(request)).encode())
    os.rename(f".{name}", name, src_dir_fd=place, dst_dir_fd=place)
    return name


def names(place: int, most: int, known: Container[str] = ()) -> list[str]:
    """Return names of requests in a directory, without ``known``; ``most`` limits their number."""
    found: list[str] = []
    with os.scandir(place) as entries:
        for entry in entries:
            if len(found) < most and _NAME.fullmatch(entry.name) and entry.name not in known:
                found.append(entry.name)
    return found


def read(place: int, name: str) -> bytes:
    """Return a request's content.

    Raise Refused if the file is too long, or is not a regular file of the user.
    """
    with os.fdopen(os.open(name, os.O_RDONLY | _FLAGS, dir_fd=place), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise Refused(f"{name} is not a file of yours")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise Refused(f"{name} is larger than {MAX_BYTES} bytes")
    return data


def withdraw(place: int, name: str) -> bool:
    """Remove a request; return whether it existed."""
    try:
        os.unlink(name, dir_fd=place)
    except FileNotFoundError:
        return False
    return True
