"""Whether a process has ended: as a zombie it has, also where process 1 is slow to reap it."""

import time
from pathlib import Path


def ended(pid, seconds=30.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if "State:\tZ" in Path("/proc", str(pid), "status").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
