"""Messages from a user's process to the service: records of limited size in a fixed format.

The service trusts no user, so it validates every record.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from vtorque_core.api import UsageError, printable
from vtorque_pbs import convention as pbs

MAX_RECORD = 128 << 10  # bytes; mostly a request (MAX_TOKEN)
MAX_TOKEN = 100_000  # characters of a request: MAX_ARG_STRLEN is 128 KiB, execve(2)
MAX_SECONDS = 10**9
MAX_TASKS = 200  # of an array; creating their files blocks all other requests
_LENGTH = struct.Struct("!I")
_TOKEN = re.compile(r"(vt1:[!-+.-~-]+)?", re.ASCII)
_MEM = re.compile(r"([0-9]{1,15}[kmgt]?[bw]?)?", re.IGNORECASE | re.ASCII)
_STATUS = re.compile(r"-?[0-9]{1,3}", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,10}", re.ASCII)
_RANGE = r"[0-9]{1,5}(-[0-9]{1,5})?"
_ARRAY = re.compile(rf"{_RANGE}(,{_RANGE})*(%[1-9][0-9]{{0,3}})?", re.ASCII)


@dataclass(frozen=True)
class LocalSubmission:
    """A new job's options, as the user's process sends them to the service.

    Attributes:
        name: ``-N``, or derived from the script's name.
        ppn: From ``-l nodes=1:ppn=N``; 0 if not given.
        walltime: Seconds; 0 means unlimited.
        mem: ``-l mem`` as given.
        token: The job request, encoded for Torque's resource list; empty on bare metal.
        array: ``-t``.
    """

    name: str
    ppn: int
    walltime: int
    mem: str
    interactive: bool
    token: str
    array: str = ""

    def __post_init__(self) -> None:
        if not pbs.is_job_name(self.name):
            raise UsageError(f"bad request: {printable(self.name, 80)} is not a job name")
        if len(self.token) > MAX_TOKEN:
            raise UsageError(
                f"the -vm request, with the files it names, has {len(self.token)} characters "
                f"(limit: {MAX_TOKEN})"
            )
        if not _TOKEN.fullmatch(self.token):
            raise UsageError("the -vm request is invalid")
        if not (self.ppn < 10_000 and self.walltime < MAX_SECONDS and _MEM.fullmatch(self.mem)):
            raise UsageError("-l: ppn, walltime or mem is too large")
        self.tasks()

    def words(self) -> tuple[str, ...]:
        """Return these options as the words of a record, which :meth:`parse` reads."""
        numbers = (str(self.ppn), str(self.walltime), str(int(self.interactive)))
        return ("submit", self.name, *numbers, self.mem, self.token, self.array)

    @classmethod
    def parse(cls, words: list[str]) -> LocalSubmission:
        """Parse the result of :meth:`words`. Raise UsageError for an invalid field."""
        if len(words) != 8 or not all(_COUNT.fullmatch(word) for word in words[2:5]):
            raise UsageError("bad request: invalid submission")
        ppn, walltime, interactive = map(int, words[2:5])
        return cls(words[1], ppn, walltime, words[5], bool(interactive), *words[6:])

    def tasks(self) -> tuple[Sequence[int], int]:
        """Return the result of :func:`array_tasks` for ``-t``; no tasks if it is not given."""
        return array_tasks(self.array) if self.array else ((), 0)

    def resources(self) -> dict[str, str]:
        """Return the resource list as Torque shows it."""
        found = {"nodes": f"1:ppn={self.ppn}" if self.ppn else "1"}
        if self.walltime:
            found["walltime"] = pbs.show_walltime(self.walltime)
        if self.mem:
            found["mem"] = self.mem
        return found | ({"other": self.token} if self.token else {})


def array_tasks(text: str) -> tuple[Sequence[int], int]:
    """Parse ``-t``, such as ``1-10,15%2``, into task numbers and the limit of concurrent tasks.

    The limit is 0 if not given. Raises UsageError if the text is invalid.
    """
    if not _ARRAY.fullmatch(text):
        raise UsageError(f"-t {printable(text, 80)}: write a list like 0-9 or 1,3,5 or 1-10%2")
    numbers, _, most = text.partition("%")
    bounds = [part.partition("-")[::2] for part in numbers.split(",")]
    ranges = [range(int(first), int(last or first) + 1) for first, last in bounds]
    if not all(ranges) or sum(map(len, ranges)) > MAX_TASKS:
        raise UsageError(f"-t {printable(text, 80)}: an array has 1 to {MAX_TASKS} tasks")
    return sorted(set().union(*ranges)), int(most or 0)


def exit_status(words: list[str]) -> int:
    """Return the exit code (or minus the signal) in an ``ended`` record.

    Raise UsageError if the record is invalid.
    """
    if len(words) != 2 or not _STATUS.fullmatch(words[1]):
        raise UsageError("bad request: invalid exit status")
    return int(words[1])


def pack(*words: str) -> bytes:
    """Encode words as a record. Raise UsageError for NUL, non-UTF-8 text, or a long record."""
    try:
        data = "\0".join(words).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{printable(' '.join(words[1:]), 80)}: is not UTF-8") from None
    if data.count(b"\0") != len(words) - 1 or len(data) > MAX_RECORD:
        raise UsageError(f"bad request: more than {MAX_RECORD} bytes, or a NUL byte")
    return _LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> tuple[list[str] | None, bytes]:
    """Return the words of the first record (None if it is incomplete), and the remaining data."""
    if len(data) < _LENGTH.size:
        return None, data
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_RECORD:
        raise UsageError(f"bad request: more than {MAX_RECORD} bytes")
    end = _LENGTH.size + length
    if len(data) < end:
        return None, data
    try:
        return data[_LENGTH.size : end].decode().split("\0"), data[end:]
    except UnicodeDecodeError:
        raise UsageError("bad request: not UTF-8") from None
