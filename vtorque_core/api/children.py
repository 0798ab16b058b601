"""Run code that may hang or crash in a forked child with a time limit. As root.

A child is killed with its process group at its deadline, and dies with its parent. A child that
survives SIGKILL is left behind.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from vtorque_core.base import locks
from vtorque_core.base._launch import die_with
from vtorque_core.base.errors import VtorqueError

_KILL_WAIT = 1.0  # seconds until a killed process counts as one that cannot end
_MAX_ERROR = 4000  # bytes; a pipe takes 65536 without a reader (pipe(7))


class Child:
    """A child process. ``error``: None while it runs, empty after success, otherwise a message."""

    def __init__(self, work: Callable[[], object], seconds: float) -> None:
        self.seconds = max(0.0, seconds)
        self.until = time.monotonic() + self.seconds
        self.error: str | None = None

        sys.stdout.flush()
        sys.stderr.flush()
        self._answer, told = os.pipe()
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self._answer)
            os.close(told)
            raise
        if self.pid == 0:
            _run(work, told, parent)
        os.close(told)
        self._handle = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        """Return the child's pidfd, which becomes readable when the child ends (pidfd_open(2))."""
        return self._handle

    def check(self) -> bool:
        """Return True if the child has ended. Kills it at its deadline."""
        if self.error is not None:
            return True
        if wait_readable([self], 0):
            self._collect()
        elif time.monotonic() >= self.until:
            self._kill()
        return self.error is not None

    def wait(self) -> str:
        """Wait for the child, and kill it at its deadline. Return the error, or an empty string."""
        while not self.check():
            wait_readable([self], self.until - time.monotonic())
        return self.error or ""

    def _collect(self) -> None:
        os.set_blocking(self._answer, False)  # a grandchild may have the other end open
        try:
            answer = os.read(self._answer, _MAX_ERROR + 1).decode("utf-8", "replace")
        except BlockingIOError:
            answer = ""
        os.close(self._answer)
        os.close(self._handle)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if answer.startswith("+"):
            self.error = ""
        else:
            self.error = answer[1:] or f"exited with status {code} without a result"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # the child may not have its own group yet
        if wait_readable([self], _KILL_WAIT):
            self._collect()
            self.error = self.error and f"timed out after {self.seconds:g} s"
            return
        os.close(self._answer)
        os.close(self._handle)
        self.error = f"timed out after {self.seconds:g} s, and process {self.pid} cannot be killed"


def run_in_child(work: Callable[[], object], seconds: float) -> str:
    """Run ``work`` in a child. Return the error, or an empty string."""
    try:
        return Child(work, seconds).wait()
    except OSError as error:
        return f"cannot fork: {error.strerror}"


def wait_any(children: Sequence[Child]) -> None:
    """Wait until one of the children ends or reaches its deadline."""
    if children:
        wait_readable(children, min(child.until for child in children) - time.monotonic())


def wait_readable(descriptors: Iterable[Child | int], seconds: float = math.inf) -> list[int]:
    """Wait until a descriptor is readable. Return all readable descriptors; on timeout, none."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    timeout = None if seconds == math.inf else max(0, int(seconds * 1000) + (seconds > 0))
    return [number for number, _ in poller.poll(timeout)]


def _run(work: Callable[[], object], told: int, parent: int) -> None:
    code = 1
    try:
        die_with(parent)
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        locks.close_inherited()
        answer = "+"
        try:
            work()
            code = 0
        except BaseException as error:
            known = isinstance(error, VtorqueError)
            answer = "-" + (str(error) if known else f"{type(error).__name__}: {error}")
        os.write(told, answer.encode("utf-8", "replace")[:_MAX_ERROR])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
