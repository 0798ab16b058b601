"""The batch system of an experiment: submit jobs with vsub, and poll the list of jobs."""

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

from vtorque_core.api import HostFault, VtorqueError, closing, name_errors, printable
from vtorque_core.live import images, service
from vtorque_experiment import files, wrapper
from vtorque_experiment.definition import Definition, Scalar
from vtorque_experiment.matrix import Cell
from vtorque_experiment.place import ResultsDirectory, read_tail

LEAST = 10.0  # the shortest interval between two queries of a batch system's server, in seconds
LEAST_LOCAL = 1.0  # the shortest interval for the batch system local, in seconds
JOB, VSUB_OUT, VSUB_ERR = "job.sh", "vsub.out", "vsub.err"  # copies for users
JOB_OUT, JOB_ERR = "batch.out", "batch.err"
REFUSED = 2  # vsub's exit status for a refused request
MAX_OUTPUT = 1 << 20  # bytes of vsub's output that are kept
# The -vm options of a point in a guest for which the experiment sets no -vm option.
GUEST_OPTIONS: Mapping[str, Scalar] = {"keep": False}
_ID = re.compile(r"[0-9]+[A-Za-z0-9_.\[\]-]{0,199}", re.ASCII)


@dataclass(frozen=True)
class BatchCommands:
    """The commands that submit and list jobs.

    Args:
        vsub: the program and its first arguments.
        jobs: returns job names and ids of the jobs that the batch system lists for the user.
        interval: seconds between two calls of ``jobs``.
        least: minimum seconds between two calls of ``jobs`` when a job seems to have ended.
        naming: the option that sets a job's name.
    """

    vsub: Sequence[str]
    jobs: Callable[[], Mapping[str, str]]
    interval: float = 30.0
    least: float = LEAST
    naming: str = "-N"


def site_batch(config: Path, interval: float) -> BatchCommands:
    """Return the commands of the site's batch system. Privileges: the user.

    ``interval`` is in seconds; :data:`LEAST` replaces a smaller value. Raises ConfigError, Refused.
    """
    site, batch = service.batch_system(config)
    submitter = batch.submitter(site)

    def jobs() -> Mapping[str, str]:
        return {job.name: job.id for job in submitter.jobs()}

    program = str(Path(sys.prefix, "bin", "vsub"))
    vsub = (program, "--config", str(config))
    own = images.site_of(config).batch.system == "local"  # a server on this machine
    least = LEAST_LOCAL if own else LEAST
    return BatchCommands(vsub, jobs, max(interval, LEAST), least, submitter.naming)


@contextlib.contextmanager
def hold_lock(path: Path, wait: bool) -> Iterator[int]:
    """Hold the lock of a lock file (flock(2)), and yield its descriptor for child processes.

    Raises HostFault if another process holds the lock and ``wait`` is false.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with name_errors(printable(str(path))):
        descriptor = os.open(path, flags, 0o600)
    with closing(descriptor):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise HostFault(
                f"{printable(str(path.parent))}: in use by another vmgr experiment; vmgr "
                "experiment status shows its progress"
            ) from None
        yield descriptor


def arguments(
    naming: Sequence[str], definition: Definition, cell: Cell, point: Path
) -> list[str]:  # fmt: skip
    """Return vsub's arguments for a point; vsub reads the job script from standard input.

    The arguments always contain a ``-vm`` option, which overrides the directives of the script.
    Therefore the script cannot select bare metal for the job.

    Args:
        naming: the arguments that set the job's name.
        definition: the experiment.
        cell: the combination of the point.
        point: the directory of the point.
    """
    argv = [*naming, "-o", str(point / JOB_OUT), "-e", str(point / JOB_ERR)]
    if cell.get("bare") is True:
        argv += ["-vm", "none"]
    else:
        pairs = {**definition.vm}
        pairs |= {axis[3:]: value for axis, value in cell.items() if axis.startswith("vm.")}
        for key, value in (pairs or GUEST_OPTIONS).items():
            argv += ["-vm", f"{key}={wrapper.text(value)}"]
    argv += definition.batch
    for axis, value in cell.items():
        if axis.startswith("batch."):
            argv += str(value).split()
    return argv


@dataclass(frozen=True)
class SubmitResult:
    """The exit status, standard output and standard error of one vsub call."""

    code: int
    out: bytes
    err: bytes

    @property
    def job(self) -> str:
        """The job id, which is the last word of vsub's output, or an empty string."""
        words = self.out[-4096:].decode("utf-8", "replace").split()
        return words[-1] if words and is_job_id(words[-1]) else ""

    @property
    def message(self) -> str:
        """The end of vsub's standard error, as one printable line."""
        return _join_lines(self.err[-400:].decode("utf-8", "replace"), 400)


def submit(
    batch: BatchCommands, argv: Sequence[str], script: bytes, place: ResultsDirectory,
    number: int, lock: int,
) -> SubmitResult:  # fmt: skip
    """Run vsub in a point's directory, with the job script on its standard input.

    vsub inherits ``lock``: if this process is killed, the lock remains held until vsub ends. vsub
    runs in a new session, so Ctrl-C does not reach it.

    Raises:
        HostFault: vsub cannot be started.
        OSError: the point's directory or a temporary file cannot be opened.
    """
    names = place.point(number).relative_to(place.top).parts
    with (
        tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err, files.directory(place.top, *names) as point,
    ):  # fmt: skip
        stdin.write(script)
        stdin.seek(0)
        with name_errors(batch.vsub[0]):
            done = subprocess.run(
                [*batch.vsub, *argv], stdin=stdin, stdout=out, stderr=err,
                cwd=f"/proc/self/fd/{point}", pass_fds=(lock,), start_new_session=True, check=False,
            )  # fmt: skip
        return SubmitResult(done.returncode, *(_read_stream(stream) for stream in (out, err)))


def _read_stream(stream: IO[bytes]) -> bytes:
    stream.seek(0)
    return stream.read(MAX_OUTPUT)


def is_job_id(word: str) -> bool:
    """Return True if a word begins with a digit and has only characters of job ids."""
    return bool(_ID.fullmatch(word))


def tail(point: Path, name: str, most: int = 400) -> str:
    """Return the printable end of a file in a point's directory; empty if it is unreadable."""
    try:
        return _join_lines(read_tail(point, name, most), most)
    except OSError:
        return ""


def _join_lines(text: str, most: int) -> str:
    return " | ".join(printable(line.strip(), most) for line in text.split("\n") if line.strip())


class JobQueries:
    """The queries for the batch system's list of jobs, at most one per interval.

    ``note`` saves the Unix time of each query. ``last`` is the time of the last query in an earlier
    run of the experiment, so that the first query of this run also waits for the interval.
    """

    def __init__(self, batch: BatchCommands, last: float, note: Callable[[float], None]) -> None:
        self._batch, self._note = batch, note
        now = time.time()
        self._next = time.monotonic() + min(batch.interval, max(0.0, last + batch.interval - now))
        self.problem = ""
        self._is_early = False

    @property
    def is_due(self) -> bool:
        """True if the next query is due."""
        return time.monotonic() >= self._next

    def ask_early(self) -> None:
        """Make the next query due earlier: ``BatchCommands.least`` seconds after the previous one.

        The runner calls this when a job seems to have ended.
        """
        early = self._next - max(0.0, self._batch.interval - self._batch.least)
        self._is_early, self._next = True, self._next if self._is_early else early

    @property
    def wait(self) -> float:
        """Seconds until the next query is due."""
        return max(0.0, self._next - time.monotonic())

    def ask(self) -> Mapping[str, str] | None:
        """Return the ids of the listed jobs by name; None if the batch system did not answer."""
        self._note(time.time())
        self._is_early = False
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
