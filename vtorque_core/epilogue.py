"""The root epilogue: walk the job's journals backwards, whatever the batch system says of it.

Runs as root on the node, as often as the batch system likes, also without a prologue.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from vtorque_core import leftovers, usage
from vtorque_core.api_batch import Usage
from vtorque_core.children import Child
from vtorque_core.errors import EXIT_FAILED, EXIT_OK, ConfigError
from vtorque_core.names import Paths
from vtorque_core.reap import release_job
from vtorque_core.records import JobHeader, JournalError, find

_AFTER = 30.0  # seconds for each thing that is done after the release


def run(config: Path, job_id: str) -> int:
    """Release all that the job still holds on this node; return the hook's exit code.

    A site config that is broken, or that others than root can write, does not stop it: then the
    default directories hold. A user's directories would have a user's journals, which say what
    root is to remove.

    Afterwards, if a guest was here and the config can be read: accounting and leftovers.
    """
    paths = _paths(config)
    jobs = _headers(paths, job_id)
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
