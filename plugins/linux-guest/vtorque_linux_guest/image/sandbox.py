"""Run what installs packages as nobody of this machine: scripts of packages, commands of recipes.

They need to be root to install, but not root of this machine: see ``_sandbox_exec``. Whatever they
do, they can write to their work directory only, with ids that nobody has. As root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vtorque_core.api import HostFault, guarded
from vtorque_linux_guest.image._sandbox_exec import IDS, PLACE

__all__ = ["IDS", "PLACE", "run"]

BASE = 2146000000
"""The namespace's ids on this machine, 65536 from here: below [node] subordinate_ids' default, and
beyond what adduser(8) and useradd(8) give to anybody."""

_LAST_WORDS = 1500  # characters of what a failed program said


def _prepare(work: Path) -> None:
    """Make the files in it the sandbox's to read, whatever the umask; before anything has run.

    Later a path in there may lead anywhere.
    """
    for path in work.iterdir():
        if path.is_file():
            path.chmod(0o644)
    (work / "tmp").mkdir()
    (work / "tmp").chmod(0o1777)


def run(work: Path, *argv: str, timeout: float, stage: str) -> str:
    """Run a program as root of a namespace, with ``work`` at :data:`PLACE`; return its stdout.

    ``work`` is an empty or such a directory below one that is root's only. The program and all it
    has started are killed after ``timeout`` seconds and when the caller dies. Raises HostFault
    with its last words.
    """
    if not os.path.lexists(work / "tmp"):
        _prepare(work)
    script = str(Path(__file__).with_name("_sandbox_exec.py"))
    command = [sys.executable, "-I", "-S", script, str(BASE), str(work), *argv]
    try:
        done = subprocess.run(
            guarded(*command),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise HostFault(f"{argv[0]}: timed out after {timeout:g} s", stage=stage) from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).decode("utf-8", "replace")
        words = said[-_LAST_WORDS:] or "it said nothing"
        raise HostFault(f"{argv[0]}: exit {done.returncode}: {words}", stage=stage)
    return done.stdout.decode("utf-8", "replace")
