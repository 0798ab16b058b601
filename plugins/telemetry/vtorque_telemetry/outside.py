"""The sampler's process that is not root's: it reads guests' lines, writes series, has the sinks.

Root's half (:mod:`vtorque_telemetry.sampler`) starts it and sends it all else; nothing comes back
but lines for the log. It opens the sinks as root (a port below 1024, secrets, keys), then becomes a
user without an account or rights. ``python -I -m vtorque_telemetry.outside CONFIG``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

from vtorque_core.api import guarded, printable
from vtorque_core.live import extensions
from vtorque_core.live.node_process import become
from vtorque_telemetry.api import GROUP, Sink
from vtorque_telemetry.jobs import Jobs
from vtorque_telemetry.outlets import Outlet, close_all
from vtorque_telemetry.series import MAX_BYTES
from vtorque_telemetry.settings import Settings
from vtorque_telemetry.tick import MAX_FILES, Name, Tick, receive, send

_OPENING = 10.0  # seconds that all sinks together have to open as root
_AGAIN = 60.0  # seconds until what could not be opened is tried again, in another process
_STUCK = 30.0  # seconds without taking anything, after which it is killed
_WAITING = 16 << 10  # bytes of its socket's buffer; a tick takes about 800, doubled by the kernel
_END = 0.7  # seconds for the end: what the sinks have, and a little
_DEATH = 1.0  # seconds until one that was killed is left to itself
_SAID = 8000  # bytes for the log at once
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
        assert self._process is not None  # noqa: S101 - it was started
        self._log(self._process)
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
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs, or somebody traces it
                process.wait(_DEATH)
        self._log(process)
        assert process.stderr is not None  # noqa: S101 - a pipe
        process.stderr.close()

    def _start(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.shutdown(socket.SHUT_RD)  # descriptors could come that are slow to close
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
        os.set_blocking(self._process.stderr.fileno(), False)

    def _log(self, process: subprocess.Popen[bytes]) -> None:
        """Log what it has said, a little each time: a flood waits in its pipe."""
        assert process.stderr is not None  # noqa: S101 - a pipe
        with contextlib.suppress(BlockingIOError):
            said = os.read(process.stderr.fileno(), _SAID).decode("utf-8", "replace")
            for line in said.splitlines():
                log.warning("%s", printable(line, _SAID))


def main() -> None:
    """Open the sinks, become the user, take what comes until there is no more."""
    logging.basicConfig(level="INFO", format="%(message)s")
    settings, openings = _openings(Path(sys.argv[1]))
    pool = ThreadPoolExecutor(max(1, len(openings)))  # a thread for each, which may hang
    tried = {name: pool.submit(opening) for name, opening in openings.items()}
    wait(tried.values(), _OPENING)
    become(settings.uid, MAX_BYTES)
    opened = {name: sink for name, each in tried.items() if (sink := _sink(name, each))}
    lasts = math.inf if len(opened) == len(tried) else _AGAIN
    end = time.monotonic() + lasts
    outlets = [Outlet(name, sink, settings.deadline) for name, sink in opened.items()]
    jobs = Jobs(settings, outlets)
    with socket.socket(fileno=0) as source:
        while time.monotonic() < end and (received := receive(source)):
            jobs.take(*received)
    close_all(outlets)
    os._exit(0)  # a sink may hang


def _sink(name: str, opened: Future[Sink]) -> Sink | None:
    """Return what was opened, or say why it was not."""
    try:
        return opened.result(0)
    except TimeoutError:
        log.warning("exporter %s: has not opened within %g s", name, _OPENING)
    except Exception as error:  # anybody's code
        log.warning("exporter %s: %s: %s", name, type(error).__name__, printable(str(error)))
    return None


def _openings(config: Path) -> tuple[Settings, dict[str, Callable[[], Sink]]]:
    """Return what opens the exporters that the site names, as root; bad names are said."""
    site, found = extensions.load(config, GROUP)
    settings = site[Settings]
    openings: dict[str, Callable[[], Sink]] = {}
    for name in dict.fromkeys(settings.exporters):
        try:
            openings[name] = partial(found.function(name), site)
        except Exception as error:  # anybody's module
            log.warning("exporter %s: %s", name, printable(str(error)))
    return settings, openings


if __name__ == "__main__":
    main()
