"""Run vmgr commands about a job on the job's node, and query nodes for a job's state."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import Command, Remote, constant_hook, deferred, hookimpl
from vtorque_login.settings import Settings

if TYPE_CHECKING:
    import click

    from vtorque_core.api import BatchSystem, JobAttempt
    from vtorque_core.api.batch_system import JobInfo, JobOnNode
    from vtorque_core.api.node_job import Site


@hookimpl
def vtorque_remote_command(
    command: click.Command, of_job: Remote, config: Path
) -> Iterator[click.Command]:
    """Wrap the command so that it runs on the job's node."""
    from vtorque_login.asking import wrap_command  # noqa: PLC0415 - click

    yield wrap_command(command, of_job, config)


@hookimpl
def vtorque_jobs_on_nodes(jobs: Sequence[JobInfo], site: Site, config: Path) -> Iterator[JobOnNode]:
    """Query the state of the jobs on each of their nodes."""
    from vtorque_login.state import query_jobs  # noqa: PLC0415 - not by vsub

    yield from query_jobs(jobs, config, site[Settings].answer_timeout)


@hookimpl
def vtorque_beside_script(
    job: JobAttempt, batch: BatchSystem, site: Site
) -> Iterator[Sequence[str]]:
    """Yield the command of a process that answers vmgr commands from other hosts.

    Yields nothing if the batch system can run commands on nodes.
    """
    if batch.step is None or batch.step(site) is None:
        words = [
            str(site.path),
            job.id,
            job.node,
            str(site[Settings].poll_interval),
            str(os.getpid()),
        ]
        yield [sys.executable, "-I", "-m", "vtorque_login.companion", *words]


vtorque_settings = constant_hook(Settings)
vtorque_kept_records = hookimpl(deferred("vtorque_login.gathered:places"))
vtorque_commands = constant_hook(
    Command("vmgr state", "vtorque_login.command:state", Remote(("files",)))
)
