"""The sampler's process that is not root's: it reads guests' lines, writes series, has the sinks.

Root's half (:mod:`vtorque_telemetry.sampler`) starts it and sends it all else; nothing comes back
but lines for the log. It opens the sinks as root (a port below 1024, secrets, keys), then becomes a
user without an account or rights. ``python -I -m vtorque_telemetry.outside CONFIG``.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from vtorque_core.api import guarded, printable
from vtorque_core.live import extensions
from vtorque_core.live.node_process import become
from vtorque_telemetry.api import GROUP
from vtorque_telemetry.jobs import Jobs
from vtorque_telemetry.outlets import Opened, Outlet, close_all
from vtorque_telemetry.series import MAX_BYTES
from vtorque_telemetry.settings import Settings
from vtorque_telemetry.tick import MAX_FILES, Name, Tick, receive, send

_OPENING = 10.0  # seconds that all sinks together have to open as root
_AGAIN = 60.0  # seconds until what could not be opened is tried again, in another process
_STUCK = 30.0  # seconds without taking anything, after which it is killed
_WAITING = 16 << 10  # bytes of its socket's buffer; a tick takes about 800, doubled by the kernel
_END = 0.7  # seconds for the end: what the sinks have, and a little
_MAX_LINE = 2000  # characters of a line for the log
_PAUSE = 0.05  # seconds between two of them
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
log = logging.getLogger("telemetry")


class Outside:
    """That process, as root sees it: started with the first tick, again if it has ended.

    Root never waits for it. Ticks that come while it is busy wait in its socket, some forty, then
    they are lost.
    """

    def __init__(self, config: Path) -> None:
        self._argv = (sys.executable, "-I", "-m", __name__, str(config))
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._has: dict[Name, int] = {}
        self._taken = 0.0  # monotonic time when it last had room

    def send(self, tick: Tick, files: Mapping[Name, int], answer: int = -1) -> None:
        """Send a tick, those of the files that it does not have, and who waits for it."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        assert self._socket is not None  # noqa: S101 - it was started
        fresh = tuple(name for name, file in files.items() if self._has.get(name) != file)
        fresh = fresh[:MAX_FILES]
        descriptors = [files[name] for name in fresh]
        if answer >= 0:
            descriptors.append(answer)
        try:
            send(self._socket, replace(tick, files=fresh), descriptors)
        except OSError as error:
            if time.monotonic() - self._taken > _STUCK or not isinstance(error, BlockingIOError):
                log.warning("its process: %s; it is started again", error)
                self.close(0)
            return
        self._taken = time.monotonic()
        had = {name: file for name, file in self._has.items() if name in files}
        self._has = {**had, **{name: files[name] for name in fresh}}

    def close(self, seconds: float = _END) -> None:
        """End the process, killed after this time."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is None:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WAITING)
        with its:
            self._process = subprocess.Popen(
                guarded(*self._argv),
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_ENVIRON,
                cwd="/",
            )
        self._socket, self._has, self._taken = ours, {}, time.monotonic()
        assert self._process.stderr is not None  # noqa: S101 - a pipe
        threading.Thread(target=_log, args=(self._process.stderr,), daemon=True).start()


def _log(lines: IO[bytes]) -> None:
    """Log what it says, so slowly that a flood costs root nothing: it waits in its pipe."""
    with lines:
        while line := lines.readline(_MAX_LINE):
            log.warning("%s", printable(line.decode("utf-8", "replace").rstrip(), _MAX_LINE))
            time.sleep(_PAUSE)


def main() -> None:
    """Open the sinks, become the user, take what comes until there is no more."""
    logging.basicConfig(level="INFO", format="%(message)s")
    settings, sinks = _sinks(Path(sys.argv[1]))
    outlets = [Outlet(name, sink, settings.deadline) for name, sink in sinks.items()]
    for outlet in outlets:
        outlet.give((), ())  # which opens it
    until = time.monotonic() + _OPENING
    for sink in sinks.values():
        sink.tried.wait(max(0.0, until - time.monotonic()))
    become(settings.uid, MAX_BYTES)
    lasts = math.inf if all(sink.is_open for sink in sinks.values()) else _AGAIN
    end = time.monotonic() + lasts
    jobs = Jobs(settings, outlets)
    with socket.socket(fileno=0) as source:
        while time.monotonic() < end and (received := receive(source)):
            jobs.take(*received)
    close_all(outlets)
    os._exit(0)  # a sink may hang


def _sinks(config: Path) -> tuple[Settings, dict[str, Opened]]:
    """Return the exporters that the site names; one that cannot be imported is said. As root."""
    site, found = extensions.load(config, GROUP)
    settings, sinks = site[Settings], {}
    for name in dict.fromkeys(settings.exporters):
        try:
            sinks[name] = Opened(partial(found.function(name), site))
        except Exception as error:  # anybody's module
            log.warning("exporter %s: %s", name, printable(str(error)))
    return settings, sinks


if __name__ == "__main__":
    main()
