"""Read and keep the end of a guest's serial console. As root, in prologue and epilogue.

The guest controls every byte, so the length is limited and control sequences are removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from vtorque_core.api.kept_records import Place
from vtorque_core.api.unprivileged_parser import parse_unprivileged
from vtorque_core.base.errors import HostFault, printable
from vtorque_core.records.reading import DOMAIN, JournalState

LINES = 20
MAX_KEPT = 256 << 10  # bytes of a guest's console that are kept after a failure
LINES_KEPT = 2000
COLLECTED = {"console.log": "console", "cloud-init.log": "cloud-init"}
"""Files in a failed guest's state directory, and the names under which they are kept."""

PANIC = 50  # lines: a panic's reason precedes registers and a trace
WIDTH = 200  # characters of one line
_BYTES = 16384  # read from the end
_MOST = 2 << 20  # bytes: LINES_KEPT lines of WIDTH characters in UTF-8
_WAIT = 0.5  # seconds to record the last output of QEMU
_POLL = 0.1
_log = logging.getLogger(__name__)
# ECMA-48 control sequences, and the two-character escapes: a firmware's screen is full of them.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[ -/]*[0-~])")


def tail(
    path: Path, lines: int = LINES, most: int = _BYTES, wait: float = _WAIT
) -> tuple[str, ...]:
    """Return the last ``lines`` nonblank lines of a console log, without control sequences.

    Reads at most ``most`` bytes, and waits at most ``wait`` seconds while the log grows.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError, HostFault), os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode):
            size = _await_quiet(file.fileno(), status.st_size, wait)
            said = parse_unprivileged(
                _last_lines, lines, most, size, files=[file.fileno()], most=_MOST
            )
            return tuple(
                printable(line.decode("utf-8", "replace"), WIDTH) for line in islice(said, lines)
            )
    return ()


def _last_lines(lines: int, most: int, size: int, console: int) -> Iterator[bytes]:
    data = os.pread(console, most, max(0, size - most))
    yield from (line.encode() for line in lines_of(data, lines))


def heading(hostname: str) -> str:
    return f"the end of the console of {hostname}:"


def _await_quiet(descriptor: int, size: int, seconds: float) -> int:
    for _ in range(int(seconds / _POLL)):
        time.sleep(_POLL)
        before, size = size, os.fstat(descriptor).st_size
        if before == size:
            break
    return size


def lines_of(data: bytes, count: int = LINES) -> tuple[str, ...]:
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    lines = (line.strip() for line in re.split(r"[\r\n]+", text))
    return tuple(printable(line, WIDTH) for line in lines if line)[-count:]


def collect(place: Place, state: JournalState, dead: set[int | None]) -> None:
    """Copy the end of each failed guest's console and cloud-init log to the kept records.

    A guest has failed if ``dead`` has its index, or if the job's start failed.
    """
    failed = not any(mark.name in ("run", "await the script") for mark in state.phases)
    for record in (r for r in state.open if r.kind == DOMAIN and r.guest is not None):
        if not failed and record.guest not in dead:
            continue
        directory = place.paths.job_state(state.key) / f"g{record.guest}"
        for source, name in COLLECTED.items():
            if lines := tail(directory / source, LINES_KEPT, MAX_KEPT, wait=0.0):
                kept = "".join(f"{line}\n" for line in lines).encode()
                with contextlib.suppress(OSError, HostFault):
                    place.write(f"{name}-g{record.guest}.log", kept)
                    _log.info(
                        "the end of the guest's %s log was kept: print it with vmgr logs --%s",
                        *(name, name),
                        extra={"guest": record.guest},
                    )
