"""``vsub -vm show_log=true``: submit, then show the job's log until the job has ended.

As the user. The log is on the node where the job runs. Where that is this host vsub follows it;
else it says where the log is to be seen, and ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable

from vtorque_core import kept, log_read
from vtorque_core.api_batch import JobInfo, Needs, SubmitArgs, Submitter
from vtorque_core.config import Site
from vtorque_core.errors import VtorqueError, printable

_ASK = 2.0  # seconds from one question to the batch system to the next
_TRIES = 3  # answers without the job until it counts as ended: a list may be late
_OVER = ("C", "F", "X", "CD", "CA", "COMPLETED", "CANCELLED", "FAILED")  # qstat(1B), squeue(1)
_ELSEWHERE = 3  # answers in which it runs and there is no log here


def submit_and_follow(
    submitter: Submitter, args: SubmitArgs, blob: bytes, needs: Needs, site: Site
) -> int:
    """Submit in a child, since that may become the batch system's command; return its exit code.

    What it prints is passed on unchanged; its last word is the job's id. The user's interrupt ends
    the showing, not the job.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _submit(submitter, args, blob, needs, writer)
    os.close(writer)
    said = _Said(reader)
    try:
        job_id = said.job_id()
        if job_id:
            _follow(job_id, submitter, site, said.pass_on)
        said.pass_on(None)
    except KeyboardInterrupt:
        sys.stderr.write("\nvsub: the job goes on; vmgr logs shows its log\n")
        return 130
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def _submit(submitter: Submitter, args: SubmitArgs, blob: bytes, needs: Needs, stdout: int) -> None:
    """Be the child."""
    code = 1
    try:
        os.dup2(stdout, 1)
        os.close(stdout)
        code = submitter.submit(args, blob, needs)
        sys.stdout.flush()
    except VtorqueError as error:
        sys.stderr.write(f"vsub: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    finally:
        sys.stderr.flush()
        os._exit(code)


class _Said:
    """What the submitting child writes to stdout, passed on as it comes."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._first = b""

    def job_id(self) -> str:
        """Wait for the first whole line, return its last word; empty if there is none."""
        while b"\n" not in self._first:
            if not self.pass_on(None, once=True):
                break
        words = self._first.split(b"\n")[0].decode("utf-8", "replace").split()
        return words[-1].partition(";")[0] if words else ""

    def pass_on(self, seconds: float | None, *, once: bool = False) -> bool:
        """Pass on what comes within ``seconds`` (None: until the end); return whether more may."""
        while self._reader >= 0:
            ready, _, _ = select.select([self._reader], [], [], seconds)
            if not ready:
                return True
            data = os.read(self._reader, 65536)
            if not data:
                os.close(self._reader)
                self._reader = -1
                return False
            self._first = (self._first + data)[:4096]
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            if once:
                return True
        return False


def _follow(
    job_id: str, submitter: Submitter, site: Site, meanwhile: Callable[[float], bool]
) -> None:
    watch = _Watch(job_id, submitter, site)
    place = None
    while place is None:
        found = kept.find(site.paths, job_id, os.getuid())
        if found:
            place = found[-1]
        elif watch.nothing_here():
            return
        else:
            meanwhile(0)
            time.sleep(log_read.POLL)

    def over() -> bool:
        meanwhile(0)
        return log_read.ended(place) or watch.gone()

    for entry in log_read.entries(place, over):
        sys.stderr.write(f"{log_read.text(entry)}\n")


class _Watch:
    """What the batch system says of the job, asked now and then."""

    def __init__(self, job_id: str, submitter: Submitter, site: Site) -> None:
        self._id = job_id
        self._submitter = submitter
        self._names = {site.node.name, socket.gethostname(), socket.gethostname().split(".")[0]}
        self._next = time.monotonic() + _ASK
        self._missed = 0
        self._running = 0

    def gone(self) -> bool:
        """Return whether the batch system does not know the job any more."""
        self._look()
        return self._missed >= _TRIES

    def nothing_here(self) -> bool:
        """Return whether there will be no log on this host; says so."""
        job = self._look()
        if job is not None and job.node and job.state in ("R", "RUNNING"):
            self._running += 1
            if self._running >= _ELSEWHERE or job.node not in self._names:
                where = printable(job.node, 60)
                sys.stderr.write(
                    f"vsub: job {self._id} runs on {where}: its log is in the job's error output, "
                    f"and on {where} vmgr logs -f {self._id} shows it\n"
                )
                return True
        return self._missed >= _TRIES

    def _look(self) -> JobInfo | None:
        """Ask if it is time to; return the job if it is listed, None also if nobody was asked."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _ASK
        with contextlib.suppress(VtorqueError, OSError):
            for job in self._submitter.jobs():
                if job.id == self._id or job.id.partition(".")[0] == self._id.partition(".")[0]:
                    self._missed = _TRIES if job.state in _OVER else 0
                    return job
            self._missed += 1
        return None
