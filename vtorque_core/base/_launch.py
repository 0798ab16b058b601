"""Program that starts a daemon which holds a lock: ``_launch.py PARENT LOCK LOG ARGV...``.

Exits with 0 after execve(2) of the daemon, otherwise with 1. The daemon's own process acquires the
lock, because children do not inherit POSIX locks.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_libc = ctypes.CDLL(None)  # loaded here: in a forked child, this could block on a lock


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (PR_SET_PDEATHSIG of prctl(2)).

    A later change of user ids cancels PR_SET_PDEATHSIG. Exits if ``parent`` has already ended.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _detach(lock: str, log: str, launcher: int) -> None:
    die_with(launcher)
    os.setsid()
    os.chdir("/")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.set_inheritable(descriptor, True)
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    output = os.open(log, flags, 0o600) if log else os.open(os.devnull, os.O_WRONLY)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _execute(argv: list[str], _: int) -> None:
    os.execvp(argv[0], argv)  # noqa: S606


def main(run: Callable[[list[str], int], None] = _execute) -> str | None:
    """Start the daemon. Return an error message for :func:`sys.exit`, or None.

    ``run`` gets the daemon's command line, and a descriptor to close when the daemon has started.
    """
    parent, lock, log, *argv = sys.argv[1:]
    die_with(int(parent))
    launcher = os.getpid()
    report, told = os.pipe()  # closes with execve(2)
    if os.fork() == 0:
        try:
            _detach(lock, log, launcher)
            run(argv, told)
        except BaseException as error:  # report every error to the launcher
            os.write(told, f"{argv[0]}: {error!r}".encode())
        finally:
            os._exit(1)
    os.close(told)
    return b"".join(iter(lambda: os.read(report, 4096), b"")).decode() or None


if __name__ == "__main__":
    sys.exit(main())
