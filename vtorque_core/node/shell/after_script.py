"""What plugins want to say at the end of a job's error output: ``vtorque_after_script``.

In the job shell, as the job's owner: the one place whose error output is the job's with every batch
system. The script has ended and its exit code is known; nothing here changes that code, and no job
ends more than :data:`SECONDS` later.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence

from vtorque_core.api import kept_records
from vtorque_core.node.shell.proof import Proof
from vtorque_core.site.config import Site
from vtorque_core.site.plugins import Plugins

SECONDS = 1.0
"""For the commands of all plugins together."""

_GONE = 0.1  # seconds until a killed command is gone, unless its disk or terminal hangs
_ENVIRON = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}  # the user's may want colours, or less


def run(proof: Proof, code: int, site: Site, plugins: Plugins) -> None:
    """Run every plugin's commands, at the very end of the process: it ignores signals from now on.

    A walltime that is over meanwhile must not take the exit code away.
    """
    place = kept_records.place(site.paths, proof.job)
    plugins = plugins.without(dict.fromkeys(proof.off, "[[limits]]"))
    found = plugins.each("vtorque_after_script", place=place, code=code, site=site)
    commands = [each.item for each in found if each.error is None]
    if commands:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        run_all(commands, 2)


def run_all(commands: Sequence[Sequence[str]], output: int, seconds: float = SECONDS) -> None:
    """Run commands one after the other with a descriptor as their output. Never raises."""
    end = time.monotonic() + seconds
    for argv in commands:
        left = end - time.monotonic()
        if left <= 0:
            return
        with contextlib.suppress(Exception):  # whatever a plugin gave as argv
            child = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL,
                env=_ENVIRON, cwd="/", start_new_session=True,
            )  # fmt: skip
            try:
                child.wait(left)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(_GONE)
