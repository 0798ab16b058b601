"""Node adapter of ``local``. The service gives prologue and epilogue Torque's arguments.

Privileges: root, in the prologue, the epilogue and the reaper.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vtorque_core.api import HostFault, Refused, printable
from vtorque_core.api.batch_system import BatchJob, JobState, NodeAdapter, Outcome, PeerGuest
from vtorque_core.api.guest_context import ContextItem
from vtorque_core.api.node_job import Site
from vtorque_core.api.setup_steps import Installation, SetupStep
from vtorque_core.api.submission import from_token
from vtorque_pbs import convention as pbs
from vtorque_pbs import nodefile

WAITS = 75  # prologue's exit code (EX_TEMPFAIL, sysexits.h) that requeues the job
PLACED = "VTORQUE_PLACED"
"""Variable with the number of an eventfd(2), with which a prologue lets the job shell start."""


class LocalNode(NodeAdapter):
    """Implementation of :class:`vtorque_core.api.batch_system.NodeAdapter` for ``local``."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Parse a prologue's arguments. Raise HostFault if they are invalid."""
        try:
            args = pbs.PrologueArgs.parse(argv)
            resources = pbs.parse_resources(args.resources)
            mem = pbs.mem_mib(resources["mem"]) if "mem" in resources else None
            token = pbs.request_token(resources)
            blob, bad = None if token is None else from_token(token), ""
        except ValueError as error:
            raise HostFault(f"the arguments are not from the local batch system: {error}") from None
        except Refused as error:  # maybe forged: report it as any invalid request
            blob, bad = b"", str(error)
        placed = int(environ[PLACED]) if PLACED in environ else None
        if placed is not None:
            os.set_inheritable(placed, False)
        host = socket.gethostname()
        return BatchJob(
            id=args.job_id,
            owner=args.user,
            node=host,
            nodes=(host,),
            blob=blob,
            cpu_count=pbs.ppn(resources["nodes"]) if ":ppn=" in resources["nodes"] else None,
            mem_mib=mem,
            name=args.job_name,
            resource_list=resources,
            bad_request=bad,
            patience=0.0,
            placed=placed,
        )

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Return the node file, which lists the guests, and variables such as PBS_NODEFILE."""
        return nodefile.items(job.id, guests)

    def finish(self, job: BatchJob, outcome: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Return the prologue's exit status.

        If another job uses a needed resource, the status is :data:`WAITS`, and the reason is on
        stdout. Otherwise the status is 0: there is no other node to try, and the job shell
        reports the reason to the user.
        """
        if outcome is Outcome.IN_USE:
            sys.stdout.write(f"{printable(reason, 500)}\n")
            sys.stdout.flush()
            return WAITS
        return pbs.prologue_exit(outcome, elsewhere=False)

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return the setup step for the systemd unit of the service, if systemd is running."""
        from vtorque_local import unit  # noqa: PLC0415 - not for each job

        return unit.steps(place)

    def job_states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Return the states of these jobs from the spool, even if the service is not running."""
        jobs = self._spool / "jobs"
        if not os.access(jobs, os.R_OK | os.X_OK):
            return dict.fromkeys(ids, JobState.UNKNOWN)
        found = {each: jobs / pbs.sequence(each) / f"{each}.SC" for each in ids}
        return {each: JobState.ALIVE if found[each].exists() else JobState.GONE for each in ids}


def create_node(site: Site) -> LocalNode:
    """Return the node adapter."""
    return LocalNode(site.paths.state / "local")
