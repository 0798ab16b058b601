"""The batch system as an experiment sees it: vsub, and one list of jobs now and then."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault, VtorqueError, printable
from vtorque_core.live import service
from vtorque_experiment import wrapper
from vtorque_experiment.definition import Definition
from vtorque_experiment.matrix import Cell
from vtorque_experiment.place import end_of

LEAST = 10.0  # seconds between two questions to a batch system's server, whoever wants less
VSUB_OUT, VSUB_ERR = "vsub.out", "vsub.err"
JOB_OUT, JOB_ERR = "batch.out", "batch.err"
REFUSED = 2  # vsub's exit code for what it will refuse again


@dataclass(frozen=True)
class Batch:
    """How jobs are submitted and listed.

    Args:
        vsub: a command line without its arguments.
        jobs: returns name to id of the jobs that the batch system knows of this user's.
        interval: seconds between two calls of that.
        naming: the option that names a job.
    """

    vsub: Sequence[str]
    jobs: Callable[[], Mapping[str, str]]
    interval: float = 30.0
    naming: str = "-N"


def of_site(config: Path, interval: float) -> Batch:
    """Return the site's batch system, asked as the user. Raises ConfigError, Refused."""
    site, batch = service.batch_system(config)
    submitter = batch.submitter(site)

    def jobs() -> Mapping[str, str]:
        return {job.name: job.id for job in submitter.jobs()}

    program = str(Path(sys.prefix, "bin", "vsub"))
    vsub = (program, "--config", str(config))
    return Batch(vsub, jobs, max(interval, LEAST), submitter.naming)


@contextlib.contextmanager
def locked(path: Path, wait: bool) -> Iterator[int]:
    """Hold a lock file's lock (flock(2)); a child that inherits the descriptor holds it, too.

    Raises HostFault: another process has it, and ``wait`` is false.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    naming: Sequence[str], definition: Definition, cell: Cell, point: Path, job: Path
) -> list[str]:
    """Return vsub's arguments for a point of a combination.

    ``naming``: the words that name its job; ``point``: its directory; ``job``: its job script.
    """
    argv = [*naming, "-o", str(point / JOB_OUT), "-e", str(point / JOB_ERR), *definition.batch]
    for axis, value in cell.items():
        if axis.startswith("batch."):
            argv += str(value).split()
    if cell.get("bare") is True:
        return [*argv, "-vm", "none", str(job)]
    pairs = {**definition.vm}
    pairs |= {axis[3:]: value for axis, value in cell.items() if axis.startswith("vm.")}
    for key, value in pairs.items():
        argv += ["-vm", f"{key}={wrapper.text(value)}"]
    return [*argv, str(job)]


def submit(batch: Batch, argv: Sequence[str], point: Path, lock: int) -> int:
    """Run vsub for a point; return its exit code. What it prints goes to the point's files.

    It inherits ``lock``: while any vsub of a killed runner lives, that is held. It is in a session
    of its own, so that Ctrl-C leaves it alone. Raises HostFault if it cannot be started.
    """
    with (point / VSUB_OUT).open("wb") as out, (point / VSUB_ERR).open("wb") as err:
        try:
            done = subprocess.run(
                [*batch.vsub, *argv], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                cwd=point, pass_fds=(lock,), start_new_session=True, check=False,
            )  # fmt: skip
        except OSError as error:
            raise HostFault(f"{batch.vsub[0]}: {error.strerror}") from None
    return done.returncode


def job_id(point: Path) -> str:
    """Return the id that vsub has printed for a point: the last word; empty if there is none."""
    words = tail(point / VSUB_OUT, 4096).split()
    return words[-1] if words else ""


def tail(path: Path, most: int = 400) -> str:
    """Return the end of a file, printable; empty if there is none."""
    try:
        lines = end_of(path, most).split("\n")
    except OSError:
        return ""
    return " | ".join(printable(line.strip(), most) for line in lines if line.strip())


class Questions:
    """Asks for the list of jobs, never more than once in an interval, nor after a resume.

    ``last``: Unix time of the last question; ``note`` keeps it.
    """

    def __init__(self, batch: Batch, last: float, note: Callable[[float], None]) -> None:
        self._batch, self._note = batch, note
        now = time.time()
        self._next = time.monotonic() + min(batch.interval, max(0.0, last + batch.interval - now))
        self.problem = ""

    @property
    def due(self) -> bool:
        """Whether a question may be asked now."""
        return time.monotonic() >= self._next

    @property
    def wait(self) -> float:
        """Seconds until then."""
        return max(0.0, self._next - time.monotonic())

    def ask(self) -> Mapping[str, str] | None:
        """Return name to id of the jobs that are there; None: the batch system did not answer."""
        self._note(time.time())
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
