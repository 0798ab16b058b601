"""The batch system as an experiment sees it: vsub, and one list of jobs now and then."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from vtorque_core.api import HostFault, VtorqueError, printable
from vtorque_core.live import images, service
from vtorque_experiment import files, wrapper
from vtorque_experiment.definition import Definition, Scalar
from vtorque_experiment.matrix import Cell
from vtorque_experiment.place import Place, end_of

LEAST = 10.0  # seconds between two questions to a batch system's server, whoever wants less
LEAST_OF_OWN = 1.0  # the same, for the batch system local
JOB, VSUB_OUT, VSUB_ERR = "job.sh", "vsub.out", "vsub.err"  # copies, for people to read
JOB_OUT, JOB_ERR = "batch.out", "batch.err"
REFUSED = 2  # vsub's exit code for what it will refuse again
MAX_SAID = 1 << 20  # bytes that are kept of what vsub prints
GUEST: Mapping[str, Scalar] = {"keep": False}  # -vm of a point in a guest that has no other key
_ID = re.compile(r"[0-9]+[A-Za-z0-9_.\[\]-]{0,199}", re.ASCII)


@dataclass(frozen=True)
class Batch:
    """How jobs are submitted and listed.

    Args:
        vsub: a command line without its arguments.
        jobs: returns name to id of the jobs that the batch system knows of this user's.
        interval: seconds between two calls of that.
        least: seconds between two calls where a job seems to have ended.
        naming: the option that names a job.
    """

    vsub: Sequence[str]
    jobs: Callable[[], Mapping[str, str]]
    interval: float = 30.0
    least: float = LEAST
    naming: str = "-N"


def of_site(config: Path, interval: float) -> Batch:
    """Return the site's batch system, asked as the user. Raises ConfigError, Refused."""
    site, batch = service.batch_system(config)
    submitter = batch.submitter(site)

    def jobs() -> Mapping[str, str]:
        return {job.name: job.id for job in submitter.jobs()}

    program = str(Path(sys.prefix, "bin", "vsub"))
    vsub = (program, "--config", str(config))
    own = images.site_of(config).batch.system == "local"  # it serves this machine alone
    least = LEAST_OF_OWN if own else LEAST
    return Batch(vsub, jobs, max(interval, LEAST), least, submitter.naming)


@contextlib.contextmanager
def locked(path: Path, wait: bool) -> Iterator[int]:
    """Hold a lock file's lock (flock(2)); a child that inherits the descriptor holds it, too.

    Raises HostFault: another process has it, and ``wait`` is false.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise HostFault(f"{printable(str(path))}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise HostFault(
                f"{printable(str(path.parent))}: another vmgr experiment runs it; "
                "vmgr experiment status shows how far it is"
            ) from None
        yield descriptor
    finally:
        os.close(descriptor)


def arguments(
    naming: Sequence[str], definition: Definition, cell: Cell, point: Path
) -> list[str]:  # fmt: skip
    """Return vsub's arguments for a point of a combination; the job script is for its stdin.

    ``naming``: the words that name its job; ``point``: its directory. On the command line ``-vm``
    wins over the lines of the script, so they cannot move the job from a guest to bare metal.
    """
    argv = [*naming, "-o", str(point / JOB_OUT), "-e", str(point / JOB_ERR)]
    if cell.get("bare") is True:
        argv += ["-vm", "none"]
    else:
        pairs = {**definition.vm}
        pairs |= {axis[3:]: value for axis, value in cell.items() if axis.startswith("vm.")}
        for key, value in (pairs or GUEST).items():
            argv += ["-vm", f"{key}={wrapper.text(value)}"]
    argv += definition.batch
    for axis, value in cell.items():
        if axis.startswith("batch."):
            argv += str(value).split()
    return argv


@dataclass(frozen=True)
class Submission:
    """The outcome of one vsub call: exit code, output and messages."""

    code: int
    out: bytes
    err: bytes

    @property
    def job(self) -> str:
        """The id of the job, the last word that vsub printed; empty if it is not one."""
        words = self.out[-4096:].decode("utf-8", "replace").split()
        return words[-1] if words and is_job_id(words[-1]) else ""

    @property
    def said(self) -> str:
        """The end of its messages, printable."""
        return _in_a_line(self.err[-400:].decode("utf-8", "replace"), 400)


def submit(
    batch: Batch, argv: Sequence[str], script: bytes, place: Place, number: int, lock: int
) -> Submission:  # fmt: skip
    """Run vsub in a point's directory, with the job script on its standard input.

    No file that a guest can write takes part. vsub inherits ``lock``: while any vsub of a killed
    runner lives, that is held. It is in a session of its own, so that Ctrl-C leaves it alone.
    Raises HostFault if vsub cannot be started, OSError.
    """
    names = place.point(number).relative_to(place.top).parts
    with (
        tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err, files.directory(place.top, *names) as point,
    ):  # fmt: skip
        given.write(script)
        given.seek(0)
        try:
            done = subprocess.run(
                [*batch.vsub, *argv], stdin=given, stdout=out, stderr=err,
                cwd=f"/proc/self/fd/{point}", pass_fds=(lock,), start_new_session=True, check=False,
            )  # fmt: skip
        except OSError as error:
            raise HostFault(f"{batch.vsub[0]}: {error.strerror}") from None
        return Submission(done.returncode, *(_all_of(stream) for stream in (out, err)))


def _all_of(stream: IO[bytes]) -> bytes:
    stream.seek(0)
    return stream.read(MAX_SAID)


def is_job_id(word: str) -> bool:
    """Return whether a word can be the id of a job, so that no command takes it for an option."""
    return bool(_ID.fullmatch(word))


def tail(point: Path, name: str, most: int = 400) -> str:
    """Return the end of a file in a point's directory, printable; empty if there is none."""
    try:
        return _in_a_line(end_of(point, name, most), most)
    except OSError:
        return ""


def _in_a_line(text: str, most: int) -> str:
    return " | ".join(printable(line.strip(), most) for line in text.split("\n") if line.strip())


class Questions:
    """Asks for the list of jobs, never more than once in an interval, nor after a resume.

    ``last``: Unix time of the last question; ``note`` keeps it.
    """

    def __init__(self, batch: Batch, last: float, note: Callable[[float], None]) -> None:
        self._batch, self._note = batch, note
        now = time.time()
        self._next = time.monotonic() + min(batch.interval, max(0.0, last + batch.interval - now))
        self.problem = ""
        self._hurried = False

    @property
    def due(self) -> bool:
        """Whether a question may be asked now."""
        return time.monotonic() >= self._next

    def hurry(self) -> None:
        """Ask earlier, since a job seems to have ended: ``least`` seconds after the last time."""
        early = self._next - max(0.0, self._batch.interval - self._batch.least)
        self._hurried, self._next = True, self._next if self._hurried else early

    @property
    def wait(self) -> float:
        """Seconds until then."""
        return max(0.0, self._next - time.monotonic())

    def ask(self) -> Mapping[str, str] | None:
        """Return name to id of the jobs that are there; None: the batch system did not answer."""
        self._note(time.time())
        self._hurried = False
        self._next = time.monotonic() + self._batch.interval
        try:
            found = self._batch.jobs()
        except VtorqueError as error:
            self.problem = printable(str(error), 300)
            return None
        except (OSError, subprocess.SubprocessError) as error:
            self.problem = printable(f"{type(error).__name__}: {error}", 300)
            return None
        self.problem = ""
        return found
