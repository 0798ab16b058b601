"""Unmount file systems of tests that may be busy for a moment."""

import contextlib
import subprocess
import time
from pathlib import Path


def unmount(place, seconds=120):
    """Unmount; the kernel may hold a file of an ended process for a moment longer.

    Fails, with the processes that hold it, if it is busy for this many seconds.
    """
    deadline = time.monotonic() + seconds
    while (done := subprocess.run(["umount", place], capture_output=True, check=False)).returncode:
        assert b"busy" in done.stderr, done.stderr
        assert time.monotonic() < deadline, f"{place} is busy: {_holders(place)}"
        time.sleep(0.05)


def _holders(place):
    """Return the commands with an open file or their working directory below ``place``."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for link in (process / "cwd", *(process / "fd").iterdir()):
                if link.readlink().is_relative_to(place):
                    found.add((process / "cmdline").read_bytes().replace(b"\0", b" "))
    return found
