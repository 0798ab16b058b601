"""Queued jobs, and the service's connections to client processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vtorque_core.api import VtorqueError
from vtorque_core.api.job_files import File
from vtorque_local import job_processes, mom
from vtorque_local.job import MAX_REST, MAX_SCRIPT, sealed_size

GIVEN = 5  # descriptors that the acceptor sends for a client: two pipes, its pidfd, two files
_PIPE = 65536  # bytes that fit into a pipe, pipe(7)


class LocalClient:
    """The service's connection to one client's process.

    A *client* is a user's command, such as ``vsub``. The *client's process* is a process of the
    batch system that serves the client with the user's uid (:mod:`vtorque_local.client`). To the
    service, it sends records (:mod:`vtorque_local.order`). The service sends it JSON objects, one
    per line:

    - ``id`` or ``error``: the answer to a submission.
    - ``start``, and later possibly ``terminate``: only for an interactive job.
    - ``code`` and ``reason``: the result, after the job's end.
    """

    def __init__(self, uid: int, pid: int, fds: Sequence[int]) -> None:
        self.uid, self.pid = uid, pid
        self.data, self.answered = b"", False
        self.entries: list[QueueEntry] = []  # several for an array
        self.results: list[tuple[int, str]] = []  # exit codes and reasons of ended jobs
        self.asked, self._tell, self._handle, *self._files = fds
        self._lock, self._open = threading.Lock(), True
        for descriptor in (self.asked, self._tell):
            os.set_blocking(descriptor, False)

    def send(self, answer: dict[str, Any]) -> None:
        """Send a line to the client's process if it still exists. Never blocks; thread-safe."""
        line = json.dumps(answer).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            if self._open and len(line) > _PIPE:
                fcntl.fcntl(self._tell, fcntl.F_SETPIPE_SZ, len(line))
            if self._open:
                os.write(self._tell, line)

    def files(self) -> tuple[int, int, int]:
        """Return the descriptors of the client's two files, and the total size in bytes.

        The first file is the script. The second file has the job's environment and the other values
        that :mod:`vtorque_local.become_job` needs.

        Raises:
            UsageError: The files are too large.
        """
        script, rest = self._files
        size = sealed_size(script, MAX_SCRIPT) + sealed_size(rest, MAX_REST)
        return script, rest, size

    def close_files(self) -> None:
        """Close the descriptors that :meth:`files` returns."""
        with self._lock:
            while self._files:
                os.close(self._files.pop())

    def tell_end(self, entry: QueueEntry, code: int, reason: str) -> None:
        """Record a job's result; report the result to the client unless tasks of an array remain.

        The result of an array is the result of the task with the greatest exit status.
        """
        self.entries.remove(entry)
        self.results.append((code, reason))
        if not self.entries:
            code, reason = max(self.results)
            self.send({"code": code, "reason": reason})

    def terminal(self) -> JobTerminal | None:
        """Return the terminal of the client's interactive job, or None unless the job runs."""
        return self.entries[0].terminal if self.entries else None

    def is_alive(self) -> bool:
        """Return whether ``pid`` still identifies the client's process. Thread-safe."""
        with self._lock:
            ended = select.poll()
            ended.register(self._handle, select.POLLIN)
            return self._open and not ended.poll(0)

    def close(self) -> None:
        """Close the connection to the client's process.

        The client's process then disconnects from the client (for example ``vsub``) and ends.
        """
        with self._lock:
            self._open = False
            for descriptor in (self.asked, self._tell, self._handle):
                os.close(descriptor)
        self.close_files()


class JobTerminal(mom.Leader):
    """The first process of an interactive job, which is a child of the client's process."""

    def __init__(self, client: LocalClient) -> None:
        self._client, self.session = client, client.pid
        self._ended, self._code = os.eventfd(0, os.EFD_CLOEXEC), -int(signal.SIGKILL)
        self._lock, self._told = threading.Lock(), False

    def fileno(self) -> int:
        """Return an eventfd(2) that is readable after the job's end."""
        return self._ended

    def tell_end(self, code: int | None) -> None:
        """Record an exit code, or None if the client disconnected. Only the first call counts."""
        with self._lock:
            if self._ended >= 0 and not self._told:
                self._told = True
                self._code = self._code if code is None else code
                os.eventfd_write(self._ended, 1)

    def close(self) -> None:
        """Close the eventfd."""
        with self._lock:
            os.close(self._ended)
            self._ended = -1

    def result(self) -> tuple[int, str]:
        """Return the job's exit code, as reported by the client's process, and an empty string.

        If the client disconnected, the exit code is -9 (SIGKILL). The string would be an error of
        the job's start. It is empty because an interactive job prints this error on its terminal.
        """
        return self._code, ""

    def terminate(self) -> None:
        """Ask the client's process to send SIGTERM to the job's process group."""
        self._client.send({"terminate": True})

    def kill(self) -> None:
        """Do nothing: the untrusted client's process could ignore a message.

        The service kills the job's processes by cgroup or PBS_JOBCOOKIE instead.
        """


class QueueEntry(mom.JobTask):
    """A queued or running job. ``number`` orders the queue: see :func:`number_of`."""

    def __init__(self, client: LocalClient | None, *args: Any) -> None:
        super().__init__(*args)
        self.number, self.client = number_of(self.directory), client
        self.again = 0.0  # monotonic time of the next try
        self.terminal: JobTerminal | None = None

    def work(self) -> bool:
        """Run a queued job, or tear down a job that was running when its service was killed.

        Then close the terminal of an interactive job. Return False if a queued job must wait for
        other jobs.
        """
        try:
            return super().work()
        finally:
            if self.terminal:
                self.terminal.close()
                self.terminal = None

    def save(self) -> None:
        """Write the job to disk."""
        replace_file(self.directory / "job", self.job.encode())

    def spared_process(self) -> int:
        """Return the pid of an interactive job's client process, otherwise 0.

        The client process is in the job's cgroup, but must survive to report the job's end.
        """
        return self.client.pid if self.client and self.terminal and self.client.is_alive() else 0

    def start(self) -> mom.Leader:
        """Start the job's first process and return it.

        For an interactive job, ask the client's process (``LocalClient``), which has the terminal,
        to start it. Raises VtorqueError if the client's process has ended.
        """
        if not self.client or not self.job.interactive:
            return super().start()
        self.terminal = JobTerminal(self.client)
        cgroup = self.job.cgroup
        if cgroup:
            job_processes.join(cgroup, self.client.pid)
        if not self.client.is_alive():
            with contextlib.suppress(OSError):  # the pid may have been reused
                if cgroup:
                    job_processes.join(str(Path(cgroup).parent), self.client.pid)
            raise VtorqueError("the terminal was closed")
        self.client.send({"start": self.job.order(self._programs.wrapper)})
        return self.terminal


def number_of(directory: Path) -> tuple[int, ...]:
    """Return the job number and array task in a directory's name, or an empty tuple."""
    number, dash, task = directory.name.partition("-")
    words = (number, task) if dash else (number,)
    return tuple(map(int, words)) if all(map(str.isdecimal, words)) else ()


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file of the spool atomically."""
    File(str(path), replace=True, content=content).create()
