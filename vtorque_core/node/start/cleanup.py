"""Release resources of killed and failed starts, and of jobs that ended without an epilogue.

As root in the prologue, which holds the job's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from vtorque_core.api.batch_system import BatchJob, JobState, NodeAdapter
from vtorque_core.api.guest_plan import JobUser
from vtorque_core.base.errors import VtorqueError
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import facts_of_job, for_job
from vtorque_core.config.site_config import Site
from vtorque_core.node.end.reap import notify, reap
from vtorque_core.node.end.teardown import TeardownReport, release_job, teardown
from vtorque_core.node.shell import proof
from vtorque_core.node.shell.proof import Proof
from vtorque_core.node.start.start_order import header, proof_file
from vtorque_core.records import log
from vtorque_core.records.journal import Journal

_log = logging.getLogger(__name__)


def release_attempts(job_id: str, site: Site, plugins: Plugins) -> None:
    _notify_plugins(site, plugins, release_job(site.paths, job_id))


def release_ended_jobs(job: BatchJob, site: Site, plugins: Plugins, adapter: NodeAdapter) -> None:
    results = reap(site, lambda ids: {**adapter.job_states(ids), job.id: JobState.ALIVE})
    _notify_plugins(site, plugins, [result.report for result in results])


def _notify_plugins(site: Site, plugins: Plugins, reports: Iterable[TeardownReport | None]) -> None:
    for fault in notify(site, plugins, reports):
        _log.warning("%s", fault)


def abort_start(job: BatchJob, site: Site, plugins: Plugins, user: JobUser, told: Proof) -> None:
    """Release a failed start's resources, and write the proof ``told``, which has the reason.

    Without a proof, the job shell would report a skipped prologue (exit status 120).
    """
    path = site.paths.journal / f"{told.job.key}.jsonl"
    try:
        if path.exists():
            proof.write(site.paths, told, gid=user.gid)
            keep, seconds = str(site.paths.proof(job.id)), site.node.release_timeout
            for _ in range(2):  # libvirtd may refuse while it is busy with a dying guest
                teardown(path, site.paths, plugins, release_timeout=seconds, keep=keep)
            return
        _, its = for_job(site, plugins, facts_of_job(job, user))
        with Journal.start(site.paths, header(told.job, job, site, its)) as journal:
            journal.acquire(proof_file(told, user, site), plugin="core", phase=told.state)
    except VtorqueError:  # mostly a full disk: report to the user anyway. The epilogue
        # removes the proof even if it is not journaled.
        log.log_defect(job.id)
        proof.write(site.paths, told, gid=user.gid)
