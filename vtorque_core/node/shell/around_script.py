"""Run plugins' commands during and after the job script: ``vtorque_{beside,after}_script``.

In the job shell, as the job's owner. The commands do not change the job's exit status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vtorque_core.api import hooks, kept_records
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.node.shell.proof import Proof

if TYPE_CHECKING:
    from subprocess import Popen

    from vtorque_core.api.strategies import BatchSystem

BESIDE, AFTER = 0.2, 1.0
"""Seconds after the script's end until commands that ran beside it, and later ones, are killed."""

_GONE = 0.1  # seconds until a killed command is gone, unless its disk or terminal hangs
_ENVIRON = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}  # the user's could enable colors


def run_beside(
    proof: Proof, batch: BatchSystem, site: Site, plugins: Plugins
) -> contextlib.AbstractContextManager[None]:
    given = {"job": proof.job, "batch": batch, "site": site}
    return keep_running(_commands(hooks.vtorque_beside_script, proof, plugins, **given))


def run_after(proof: Proof, code: int, site: Site, plugins: Plugins) -> None:
    """Run the plugins' commands after the script, with all signals blocked.

    Otherwise a signal at the end of the walltime could change the job's exit status.
    """
    place = kept_records.place(site.paths, proof.job)
    given = {"place": place, "code": code, "site": site}
    commands = _commands(hooks.vtorque_after_script, proof, plugins, **given)
    if commands:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        run_all(commands, 2)


@contextlib.contextmanager
def keep_running(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    # Guests already run, and can write to directories in the user's LD_LIBRARY_PATH.
    kept = {name: v for name, v in os.environ.items() if name.startswith(("PBS_", "SLURM_"))}
    children = []
    for argv in commands:
        with contextlib.suppress(Exception):  # whatever a plugin gave as argv
            children.append(_start(argv, kept | _ENVIRON))
    try:
        yield
    finally:
        for child in children:
            child.terminate()
        until = time.monotonic() + BESIDE
        for child in children:
            _end(child, until)


def run_all(commands: Sequence[Sequence[str]], output: int, seconds: float = AFTER) -> None:
    until = time.monotonic() + seconds
    for argv in commands:
        if time.monotonic() < until:
            with contextlib.suppress(Exception):  # whatever a plugin gave as argv
                _end(_start(argv, _ENVIRON, output), until)


def _commands(
    hook: Callable[..., Iterable[Sequence[str]]], proof: Proof, plugins: Plugins, **given: Any
) -> list[Sequence[str]]:
    plugins = plugins.withhold(dict.fromkeys(proof.off, "[[limits]]"))
    return [each.item for each in plugins.each(hook, **given) if each.error is None]


def _start(
    argv: Sequence[str], environ: Mapping[str, str], output: int | None = None
) -> Popen[bytes]:
    import subprocess  # noqa: PLC0415 - few sites have any

    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        list(argv), stdin=nothing, stdout=nothing if output is None else output, stderr=nothing,
        env=environ, cwd="/", start_new_session=True,
    )  # fmt: skip


def _end(child: Popen[bytes], until: float) -> None:
    import subprocess  # noqa: PLC0415 - as above

    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(0.0, until - time.monotonic()))
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GONE)
