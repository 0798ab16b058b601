"""Run package scripts and recipe commands without privileges on this machine.

Installing packages needs only the root user of a user namespace: see ``_sandbox_exec``. The
programs run with otherwise unused ids and can write only to their work directory. Called as root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vtorque_core.api import HostFault, guard_command
from vtorque_linux_guest.image._sandbox_exec import IDS, PLACE

__all__ = ["IDS", "PLACE", "run"]

BASE = 2146000000
"""First of the namespace's 65536 ids on this machine: below the default of [node] subordinate_ids,
and above the ids that adduser(8) and useradd(8) assign."""

_LAST_WORDS = 1500  # characters of a failed program's output


def _prepare(work: Path) -> None:
    """Make the files in ``work`` readable for the sandbox, and create ``work``/tmp.

    Call it only before the first run: later, programs in the sandbox may have created links in
    ``work`` to files outside.
    """
    for path in work.iterdir():
        if path.is_file():
            path.chmod(0o644)
    (work / "tmp").mkdir()
    (work / "tmp").chmod(0o1777)


def run(work: Path, *argv: str, timeout: float, stage: str) -> str:
    """Run a program as root of a user namespace; return its stdout.

    The program sees ``work`` at the path :data:`PLACE`. Only root may have access to the parent of
    ``work``. All processes are killed after ``timeout`` seconds, or when the caller dies. Raises
    HostFault if the program fails.
    """
    if not os.path.lexists(work / "tmp"):
        _prepare(work)
    script = str(Path(__file__).with_name("_sandbox_exec.py"))
    command = [sys.executable, "-I", "-S", script, str(BASE), str(work), *argv]
    try:
        done = subprocess.run(
            guard_command(*command),
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
        output = said[-_LAST_WORDS:] or "no output"
        raise HostFault(f"{argv[0]}: exit code {done.returncode}: {output}", stage=stage)
    return done.stdout.decode("utf-8", "replace")
