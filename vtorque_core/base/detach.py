"""Go on in a process of our own while the hook that called us ends.

For batch systems whose daemon waits for its hooks. Runs as root.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def detached(work: Callable[[Callable[[], None]], int]) -> int:
    """Run ``work`` in a child that outlives this process; return 0 as soon as it has begun.

    ``work`` gets a function that it calls once others can see that it is at work; it has begun
    too when it has ended. The child has a session of its own and none of this process's files.
    Raises OSError if the host cannot fork.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os.read(reader, 1)  # its end comes with the child's death, too
        os.close(reader)
        return 0
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers
            if descriptor not in (writer, null):  # taken: syslog(3), say, has kept its number
                os.dup2(null, descriptor, inheritable=descriptor < 3)
        code = work(lambda: _begun(writer))
    finally:
        os._exit(code)


def _begun(writer: int) -> None:
    os.write(writer, b"1")
