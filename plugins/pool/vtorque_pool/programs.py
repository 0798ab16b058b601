"""``vtorque-pool resume|suspend|failed NODES``: Slurm's ResumeProgram and related programs.

Slurm calls these programs with blocked signals, without PATH and, before 22.05, without SLURM_CONF.
Child processes would inherit the blocked signals: a slurmd started this way ignored SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vtorque_core.api import VtorqueError, printable
from vtorque_pool import on_slurm
from vtorque_pool.hostlist import expand
from vtorque_pool.opening import logger, open_pool, require_state
from vtorque_pool.settings import Settings
from vtorque_pool.slurm import Slurm

_WORDS = {"resume": on_slurm.resume, "suspend": on_slurm.suspend, "failed": on_slurm.delete_failed}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that ``argv`` names: resume, suspend or failed. Return the exit status."""
    parser = argparse.ArgumentParser(prog="vtorque-pool", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=sorted(_WORDS))
    parser.add_argument("nodes", help="cloud[1-3]")
    parser.add_argument("--config", type=Path, default=None)
    _open_streams()
    try:
        wanted = parser.parse_args(argv)
    finally:  # also after --help or a usage error
        _flush()
    begin()
    settings = Settings()
    try:
        site, machines = open_pool(wanted.config)
        settings = site[Settings]
        require_state(settings)
        return _WORDS[wanted.what](machines, Slurm(settings), expand(wanted.nodes))
    except (VtorqueError, ValueError) as error:
        text = printable(f"{wanted.what} {wanted.nodes}: {error}", 2000)
        logger(Path(settings.log))(text)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"vtorque-pool: {text}\n")
        _flush()
        return 1


def _open_streams() -> None:
    """Open closed output streams to /dev/null, so that no other file gets their descriptors."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115


def _flush() -> None:
    """Flush the output streams now, because an error at Python's exit would print a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stdout:
                sys.exit(f"vtorque-pool: standard output: {error.strerror}")


def begin() -> None:
    """Reset the process's signals, file limit and PATH."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGQUIT):
        signal.signal(each, signal.SIG_DFL)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ["PATH"] = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    os.environ.setdefault("HOME", os.path.expanduser("~"))  # noqa: PTH111 - from the user database


if __name__ == "__main__":
    sys.exit(main())
