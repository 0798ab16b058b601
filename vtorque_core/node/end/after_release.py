"""Steps of the epilogue after a job's resources are released. As root, on the node."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vtorque_core.api import kept_records
from vtorque_core.api.children import run_in_child
from vtorque_core.base.names import Paths
from vtorque_core.config.load import load
from vtorque_core.node.end.reap import AFTER, notify, reap_until_clean
from vtorque_core.node.end.teardown import TeardownReport, total_usage
from vtorque_core.records.reading import JobHeader

_KILLED = "the process that started the guests was killed"


def finish(
    config: Path, job: JobHeader, reports: Sequence[TeardownReport], *, clean: bool, lost: bool
) -> None:
    """Update accounting, kill leftovers and call plugins, each in a child with a time limit.

    ``lost``: the job's start was killed, so requeue the job.
    """
    used = total_usage(report.usage for report in reports)
    failures: list[str] = []
    try:
        site, plugins = load(config, node=True)
        if used is not None or job.whole_node:
            kept_records.sweep(site.paths, site.kept.days, site.kept.mib, time.time())
        if job.batch == site.batch.system:
            adapter = plugins.batch_system(job.batch).node(site)
            if not clean:
                reap_until_clean(site, plugins, job.job.id, adapter.job_states)
            if lost:
                failures.append(run_in_child(partial(adapter.start_again, job.job, _KILLED), AFTER))
            if used is not None:
                failures.append(run_in_child(partial(adapter.account, job.job.id, used), AFTER))
        if job.whole_node and site.batch.kill_leftovers:
            failures.append(run_in_child(partial(_kill_leftovers, site.paths, job), AFTER))
        failures += notify(site, plugins, reports)
    except Exception as error:  # a plugin may raise anything
        failures.append(str(error))
    for message in filter(None, failures):
        sys.stderr.write(f"vtorque: {job.job.id}: after the release: {message}\n")


def _kill_leftovers(paths: Paths, job: JobHeader) -> None:
    from vtorque_core.node.end import leftovers  # noqa: PLC0415 - few jobs have a whole node

    told = leftovers.kill(paths, job)
    if told:
        sys.stderr.write(f"vtorque: {told}\n")
