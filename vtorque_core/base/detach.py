"""Continue in a new process, for batch systems whose daemon waits for its hooks. As root."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable


def run_detached(work: Callable[[Callable[[], None]], int]) -> int:
    """Run ``work`` in a child that outlives this process.

    Returns 0 when ``work`` calls the function that it gets as argument. If the child ends without
    this call, returns the child's exit status.
    """
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        called = os.read(reader, 1)  # empty if the child has ended
        os.close(reader)
        return 0 if called else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers
            if descriptor not in (writer, null):  # replaced: syslog(3) keeps its number
                os.dup2(null, descriptor, inheritable=descriptor < 3)
        code = work(lambda: _await_start(writer))
    finally:
        os._exit(code)


def _await_start(writer: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the hook was killed: the work continues
        os.write(writer, b"1")
