"""What plugins run beside a job's script: ``vtorque_beside_script``.

In the job shell, as the job's owner. The script's exit code is the job's, and its end the job's
end: at most :data:`SECONDS` later nothing of this is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

SECONDS = 0.2
"""For all commands together to end by themselves."""

_GONE = 0.1  # seconds until a killed command is gone, unless its disk hangs


@contextlib.contextmanager
def running(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Have the commands run meanwhile. Never raises by itself."""
    # Guests run by now, and code in them writes where the user's LD_LIBRARY_PATH leads.
    kept = {name: v for name, v in os.environ.items() if name.startswith(("PBS_", "SLURM_"))}
    environ = kept | {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    children = []
    for argv in commands:
        with contextlib.suppress(Exception):  # whatever a plugin gave as argv
            child = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=environ, cwd="/", start_new_session=True,
            )  # fmt: skip
            children.append(child)
    try:
        yield
    finally:
        _end(children)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    until = time.monotonic() + SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, until - time.monotonic()))
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GONE)
