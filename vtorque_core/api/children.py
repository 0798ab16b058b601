"""Run something that may hang or break in a forked child, with a time limit. As root, on the node.

Plugin code and releases that can block run here, so that neither takes the teardown with it. A
child is killed with its whole process group when its time is up, and by the kernel when its
parent dies. One that even SIGKILL does not end (a device or file system that hangs) is left
behind and reported; it never returns to its code.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence

from vtorque_core.base import locks
from vtorque_core.base._launch import die_with
from vtorque_core.base.errors import VtorqueError

_KILL_WAIT = 1.0  # seconds until a killed process counts as one that cannot end
_MAX_ERROR = 4000  # bytes; a pipe takes 65536 without a reader (pipe(7))


class Child:
    """A running child. ``error`` is None until it has ended, then empty or what went wrong."""

    def __init__(self, work: Callable[[], None], seconds: float) -> None:
        """Fork, run ``work`` for at most ``seconds``. Raises OSError if the host cannot fork."""
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
        """Return what poll(2) shows as readable when the child has ended (pidfd_open(2))."""
        return self._handle

    def check(self) -> bool:
        """Return whether the child has ended; kills it if its time is up. Never blocks long."""
        if self.error is not None:
            return True
        if readable([self], 0):
            self._collect()
        elif time.monotonic() >= self.until:
            self._kill()
        return self.error is not None

    def wait(self) -> str:
        """Wait for the end, at most until the time is up; return the error, empty if none."""
        while not self.check():
            readable([self], self.until - time.monotonic())
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
            self.error = answer[1:] or f"ended with {code} and no word"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # it may not have made its group yet
        if readable([self], _KILL_WAIT):
            self._collect()
            self.error = self.error and f"no end after {self.seconds:g} s"
            return
        os.close(self._answer)
        os.close(self._handle)
        self.error = f"no end after {self.seconds:g} s, and process {self.pid} cannot be killed"


def in_child(work: Callable[[], None], seconds: float) -> str:
    """Run work in a child for at most ``seconds``; return what went wrong, empty if nothing."""
    try:
        return Child(work, seconds).wait()
    except OSError as error:
        return f"cannot fork: {error.strerror}"


def wait_any(children: Sequence[Child]) -> None:
    """Wait until one of the children has ended or its time is up."""
    if children:
        readable(children, min(child.until for child in children) - time.monotonic())


def readable(descriptors: Sequence[Child | int], seconds: float) -> bool:
    """Wait until one can be read; a pidfd can when its process has ended (pidfd_open(2))."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0, int(seconds * 1000) + (seconds > 0))))


def _run(work: Callable[[], None], told: int, parent: int) -> None:
    """Be the child: run the work, tell how it ended, and leave without Python's clean-up."""
    code = 1
    try:
        die_with(parent)
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        locks.forget()
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
