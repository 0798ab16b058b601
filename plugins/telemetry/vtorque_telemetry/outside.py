"""The exporters' process: what listens, or hears answers, is no process of root's.

The sampler starts it with its first samples and sends it all others through a pipe; nothing comes
back but lines for the log. It opens the sinks as root (a port below 1024, secrets, keys) and then
becomes a user without an account, rights or files. ``python -I -m vtorque_telemetry.outside CONFIG
NAME...``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from vtorque_core.api import guarded, printable
from vtorque_core.live import extensions
from vtorque_telemetry.api import GROUP, Sample
from vtorque_telemetry.outlets import Opened, Outlet, close_all
from vtorque_telemetry.settings import Settings

_OPENING = 10.0  # seconds that all sinks together have to open as root
_AGAIN = 60.0  # seconds until what could not be opened is tried again, in another process
_END = 0.4  # seconds for the end, less than the sampler has
_MAX_LINE = 2000  # characters of a line for the log
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
log = logging.getLogger("telemetry")


class Outside:
    """All sinks that are no root's, as one of the sampler's (:class:`vtorque_telemetry.api.Sink`).

    What is written while the process is busy waits in the pipe, and then in the sampler's thread
    for this sink: neither the sampler nor a job waits.
    """

    def __init__(self, config: Path, names: Sequence[str]) -> None:
        self._argv = (sys.executable, "-I", "-m", __name__, str(config), *names)
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, samples: Sequence[Sample], _deadline: float) -> None:
        """Send them. Raises OSError if the process has just ended: it is started with the next."""
        self._send(samples)

    def end(self, jobs: Collection[str]) -> None:
        """Send which jobs have ended."""
        self._send(frozenset(jobs))

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):  # it has ended before
            process.stdin.close()
        try:
            process.wait(_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _send(self, word: Any) -> None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._started()
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        pickle.dump(word, self._process.stdin)
        self._process.stdin.flush()

    def _started(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        argv, null = guarded(*self._argv), subprocess.DEVNULL
        process = subprocess.Popen(
            argv, stdin=pipe, stdout=null, stderr=pipe, env=_ENVIRON, cwd="/"
        )
        assert process.stderr is not None  # noqa: S101 - a pipe
        threading.Thread(target=_log, args=(process.stderr,), daemon=True).start()
        return process


def _log(lines: IO[bytes]) -> None:
    with lines:
        while line := lines.readline(_MAX_LINE):
            log.warning("%s", printable(line.decode("utf-8", "replace").rstrip(), _MAX_LINE))


def main() -> None:
    """Open the sinks, become the user, give them what comes until there is no more."""
    logging.basicConfig(level="INFO", format="%(message)s")
    config, *names = sys.argv[1:]
    site, found = extensions.load(Path(config), GROUP)
    settings = site[Settings]
    sinks = {name: Opened(partial(found.function(name), site)) for name in names}
    outlets = [Outlet(name, sink, settings.deadline) for name, sink in sinks.items()]
    for outlet in outlets:
        outlet.give((), ())  # which opens it
    until = time.monotonic() + _OPENING
    for sink in sinks.values():
        sink.tried.wait(max(0.0, until - time.monotonic()))
    become(settings.uid)
    lasts = math.inf if all(sink.is_open for sink in sinks.values()) else _AGAIN
    end = time.monotonic() + lasts
    ended: frozenset[str] = frozenset()
    with contextlib.suppress(EOFError):
        while time.monotonic() < end:
            word = pickle.load(sys.stdin.buffer)  # noqa: S301 - root's, through a pipe of its own
            if isinstance(word, frozenset):  # the samples of the same moment come next
                ended |= word
                continue
            for outlet in outlets:
                outlet.give(word, ended)
            ended = frozenset()
    close_all(outlets)
    os._exit(0)  # a sink may hang


def become(uid: int) -> None:
    """Have no rights any more, in all threads (setresuid(2), "C library/kernel differences").

    New ones this process cannot get since its start (``guarded``).
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


if __name__ == "__main__":
    main()
