"""The root epilogue: walk the job's journals backwards, whatever the batch system says of it.

Runs as root on the node, as often as the batch system likes, also without a prologue. What it
writes to stdout is for the user: batch systems put that into the job's output.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from vtorque_core import kept, leftovers, usage
from vtorque_core.api_batch import Usage
from vtorque_core.children import Child
from vtorque_core.errors import (
    EXIT_FAILED,
    EXIT_GUEST_DIED,
    EXIT_OK,
    ConfigError,
    VtorqueError,
)
from vtorque_core.names import Paths
from vtorque_core.reap import release_job
from vtorque_core.records import DOMAIN, JobHeader, JournalError, find

_AFTER = 30.0  # seconds for each thing that is done after the release
_DYING = 1.5  # seconds that libvirt may take to see that a QEMU has ended


def run(config: Path, job_id: str, status: str = "") -> int:
    """Release all that the job still holds on this node; return the hook's exit code.

    ``status``: how the job has ended, if the batch system says so. If the wrapper has said that
    a guest died, the end of that guest's console is shown first: only root can read it.

    A site config that is broken, or that others than root can write, does not stop it: then the
    default directories hold. A user's directories would have a user's journals, which say what
    root is to remove.

    Afterwards, if a guest was here and the config can be read: accounting and leftovers.
    """
    paths = _paths(config)
    jobs = _headers(paths, job_id)
    if status == str(EXIT_GUEST_DIED):
        for line in _last_words(paths, job_id):
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    for job in jobs[-1:]:
        kept.place(paths, job.uid, job.id, job.attempt).add_facts(status=status)
    reports = release_job(paths, job_id)
    for report in reports:
        for line in report.lines():
            sys.stderr.write(f"vtorque: {line}\n")
    if jobs:
        _after(config, jobs[-1], usage.total(report.usage for report in reports))
    return EXIT_OK if all(report.clean for report in reports) else EXIT_FAILED


def _headers(paths: Paths, job_id: str) -> list[JobHeader]:
    try:
        return [state.header for state in find(paths, job_id)]
    except JournalError:
        return []  # the release says it


def _after(config: Path, job: JobHeader, used: Usage | None) -> None:
    """Tell the accounting, kill leftovers. What fails is only told: all is released."""
    from vtorque_core.config import build, plugins_config, read_toml  # noqa: PLC0415
    from vtorque_core.plugins import Plugins  # noqa: PLC0415

    if used is None and not job.whole_node:
        return
    errors = []
    try:
        raw = read_toml(config)
        wanted = plugins_config(raw)
        plugins = Plugins.load(node=True, enable=wanted.enable, disable=wanted.disable)
        site = build(raw, plugins, node=True)
        kept.sweep(site.paths, site.kept.days, site.kept.mib, time.time())
        if used is not None and job.batch == site.batch.system:
            adapter = plugins.batch_system(job.batch).node(site)
            errors.append(_try(functools.partial(adapter.account, job.id, used)))
        if site.batch.kill_leftovers:
            errors.append(_try(functools.partial(_kill_leftovers, site.paths, job)))
    except Exception as error:  # a plugin may raise anything
        errors.append(str(error))
    for message in filter(None, errors):
        sys.stderr.write(f"vtorque: {job.id}: after the release: {message}\n")


def _try(work: functools.partial[None]) -> str:
    """Run it in a child with a time limit: a batch system's server may not answer."""
    return Child(work, _AFTER).wait()


def _kill_leftovers(paths: Paths, job: JobHeader) -> None:
    told = leftovers.kill(paths, job)
    if told:
        sys.stderr.write(f"vtorque: {told}\n")


def _last_words(paths: Paths, job_id: str) -> Iterator[str]:
    """Yield what the dead guests of a job said last, printable."""
    from vtorque_core.domain import console  # noqa: PLC0415

    try:
        for state in find(paths, job_id):
            for record in (each for each in state.open if each.kind == DOMAIN):
                if _died(record.args["uri"], record.args["uuid"]):
                    log = paths.job_state(state.key) / f"g{record.guest}" / "console.log"
                    if lines := console.tail(log, console.PANIC):
                        yield console.heading(record.args["name"])
                        yield from (f"| {line}" for line in lines)
    except VtorqueError as error:  # libvirtd is down: the release says so too
        sys.stderr.write(f"vtorque: {error}\n")


def _died(uri: str, uuid: str) -> bool:
    """Return whether a guest is dead; its stream may have ended a moment before its QEMU."""
    from vtorque_core import hypervisor  # noqa: PLC0415

    end = time.monotonic() + _DYING
    while hypervisor.domain_state(uri, uuid) in ("running", "paused"):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _paths(config: Path) -> Paths:
    from vtorque_core.config import paths_of, read_toml  # noqa: PLC0415
    from vtorque_core.trust import require_root_owned  # noqa: PLC0415

    try:
        if config.exists():
            require_root_owned(config, uid=os.geteuid())
        return paths_of(read_toml(config))
    except ConfigError as error:
        sys.stderr.write(f"vtorque: warning: {error}\n")
        return Paths()
