"""Helpers for tests of a job's daemons (virtiofsd, qemu-storage-daemon)."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import open_files

# Output of virtiofsd: QEMU's (in C), and the one in Rust.
CONNECTED = re.compile("Received vhost-user socket connection|Client connected")


@contextlib.contextmanager
def place_for(stop: Callable[[str, float], object]) -> Iterator[Path]:
    """Return a directory that QEMU's user can search, unlike pytest's; ``stop`` its daemons."""
    path = Path(tempfile.mkdtemp(prefix="vtorque-e2e-"))
    path.chmod(0o711)
    (path / "run").mkdir(mode=0o711)
    yield path
    for lock in (path / "run").glob("*.lock"):
        stop(str(lock), time.monotonic() + 30)
    shutil.rmtree(path)


def make(path: Path, content: str | None, mode: int, uid: int, gid: int) -> None:
    """Make a file, or a directory if there is no content."""
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    os.chown(path, uid, gid)
    path.chmod(mode)


def holders(path: str) -> set[int]:
    """Return every live process but this one that has the file open."""
    either = {path, f"{path} (deleted)"}
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if either & open_files(place.name):
                found.add(int(place.name))
    return found - {os.getpid()}


def kill_a_start(module: str, start: str, delay: float) -> None:
    """Call ``start`` of a module of resources in a process, killed ``delay`` seconds later."""
    script = f"from vtorque_core.resources import {module}; start = {module}.{start}; "
    script += "print(flush=True); start()"
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    with starter.stdout as out:
        assert out.readline() == b"\n", "the process cannot start a daemon"
        time.sleep(delay)
        starter.kill()
        starter.wait(180)
