"""The sampler's unprivileged process: reads guests' metrics, writes series.jsonl, calls sinks.

Root's part (:mod:`vtorque_telemetry.sampler`) starts this process and sends it measurements. This
process sends back only log lines. It starts as root, to open the sinks' ports and secrets, then
switches to a uid without account or privileges. Usage:
``python -I -m vtorque_telemetry.unprivileged_sampler CONFIG``.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vtorque_core.api import guard_command, printable
from vtorque_core.live import extensions
from vtorque_core.live.node_process import switch_user
from vtorque_telemetry.api import GROUP, SampleSink
from vtorque_telemetry.outlets import ExporterThread, close_all
from vtorque_telemetry.samples import Samples
from vtorque_telemetry.series import MAX_BYTES
from vtorque_telemetry.settings import Settings
from vtorque_telemetry.tick import MAX_FILES, Name, Tick, receive, send

_OPENING = 10.0  # seconds that all sinks together have to open as root
_AGAIN = 60.0  # seconds until a new process tries again to open sinks that failed
_STUCK = 30.0  # seconds without receiving a tick, after which the process is killed
_WAITING = 16 << 10  # bytes of the socket's buffer; a tick takes about 800, doubled by the kernel
_END = 0.7  # seconds for the process to end: the time to close the sinks, and a margin
_DEATH = 1.0  # seconds to wait for the end of a killed process
_SAID = 8000  # bytes that are logged at once
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
log = logging.getLogger("telemetry")


@dataclass
class _ExportersProcess:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    said: int  # the read end of its standard error
    has: dict[Name, int]  # files that were sent to it
    taken: float  # monotonic time of the last tick that its socket accepted


class UnprivilegedExporters:
    """Root's handle of the unprivileged process. ``send`` starts the process if it does not run.

    ``send`` never waits. While the process is busy, the socket holds about 40 ticks; further ticks
    are lost.
    """

    def __init__(self, config: Path) -> None:
        self._argv = (sys.executable, "-I", "-m", __name__, str(config))
        self._life: _ExportersProcess | None = None

    def send(self, tick: Tick, files: Mapping[Name, int], answer: int = -1) -> None:
        """Send a tick, all files that were not sent before, and the pipe ``answer``."""
        if self._life is None or self._life.process.poll() is not None:
            self.close()
            self._life = _start(self._argv)
        life = self._life
        _log(life.said)
        fresh = [name for name, file in files.items() if life.has.get(name) != file][:MAX_FILES]
        descriptors = [files[name] for name in fresh]
        if answer >= 0:
            descriptors.append(answer)
        try:
            send(life.socket, replace(tick, files=tuple(fresh)), descriptors)
        except OSError as error:
            if time.monotonic() - life.taken > _STUCK or not isinstance(error, BlockingIOError):
                log.warning("the exporters' process: %s; restarting it", error)
                self.close(0)
            return
        life.taken = time.monotonic()
        had = {name: file for name, file in life.has.items() if name in files}
        life.has = {**had, **{name: files[name] for name in fresh}}

    def close(self, seconds: float = _END) -> None:
        """End the process, and kill it if it still runs after ``seconds``."""
        life, self._life = self._life, None
        if life is None:
            return
        life.socket.close()
        try:
            life.process.wait(seconds)
        except subprocess.TimeoutExpired:
            life.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs or is traced
                life.process.wait(_DEATH)
        _log(life.said)
        os.close(life.said)


def _start(argv: tuple[str, ...]) -> _ExportersProcess:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.shutdown(socket.SHUT_RD)  # the process could send descriptors that are slow to close
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WAITING)
    said, says = os.pipe()
    os.set_blocking(said, False)
    with its, open(says, "wb") as errors:  # noqa: PTH123 - a descriptor
        process = subprocess.Popen(
            guard_command(*argv),
            stdin=its.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=_ENVIRON,
            cwd="/",
        )
    return _ExportersProcess(process, ours, said, {}, time.monotonic())


def _log(said: int) -> None:
    """Log at most :data:`_SAID` bytes from the pipe ``said``; the rest waits in the pipe."""
    with contextlib.suppress(BlockingIOError):
        for line in os.read(said, _SAID).decode("utf-8", "replace").splitlines():
            log.warning("%s", printable(line, _SAID))


def main() -> None:
    """Open the sinks, drop privileges, and process ticks until the end of input."""
    logging.basicConfig(level="INFO", format="%(message)s")
    settings, openings = _openings(Path(sys.argv[1]))
    pool = ThreadPoolExecutor(max(1, len(openings)))  # one thread per sink: an opening may hang
    tried = {name: pool.submit(opening) for name, opening in openings.items()}
    wait(tried.values(), _OPENING)
    switch_user(settings.uid, MAX_BYTES)
    opened = {name: sink for name, each in tried.items() if (sink := _sink(name, each))}
    lasts = math.inf if len(opened) == len(tried) else _AGAIN
    end = time.monotonic() + lasts
    outlets = [ExporterThread(name, sink, settings.write_timeout) for name, sink in opened.items()]
    samples = Samples(settings, outlets)
    with socket.socket(fileno=0) as source:
        while time.monotonic() < end and (received := receive(source)):
            samples.take(*received)
    close_all(outlets)
    os._exit(0)  # a sink may hang


def _sink(name: str, opened: Future[SampleSink]) -> SampleSink | None:
    try:
        return opened.result(0)
    except TimeoutError:
        log.warning("exporter %s: not ready within %g s", name, _OPENING)
    except Exception as error:  # third-party code
        log.warning("exporter %s: %s: %s", name, type(error).__name__, printable(str(error)))
    return None


def _openings(config: Path) -> tuple[Settings, dict[str, Callable[[], SampleSink]]]:
    """Return the settings, and functions that open exporters. Log exporters that fail to load."""
    site, found = extensions.load(config, GROUP)
    settings = site[Settings]
    openings: dict[str, Callable[[], SampleSink]] = {}
    for name in dict.fromkeys(settings.exporters):
        try:
            openings[name] = partial(found.function(name), site)
        except Exception as error:  # third-party module
            log.warning("exporter %s: %s", name, printable(str(error)))
    return settings, openings


if __name__ == "__main__":
    main()
