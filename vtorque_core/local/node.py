"""The node half of ``local``: reads Torque's hook arguments; runs as root in hooks and reaper."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vtorque_core.api_batch import BatchJob, HookFile, Life, Outcome
from vtorque_core.batch import pbs_convention as pbs
from vtorque_core.errors import HostFault, Refused
from vtorque_core.local.spool import Spool
from vtorque_core.names import Paths
from vtorque_core.request import from_token


class LocalNode:
    """See :class:`vtorque_core.api_batch.NodeAdapter`."""

    def __init__(self, spool: Path = Paths().state / "local") -> None:  # noqa: B008
        self._spool = spool

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read a prologue's or epilogue's arguments. Raises HostFault."""
        try:
            args: pbs.PrologueArgs | pbs.EpilogueArgs = (
                pbs.PrologueArgs.parse(argv) if len(argv) <= 8 else pbs.EpilogueArgs.parse(argv)
            )
            resources = pbs.parse_resources(args.resources)
            mem = pbs.mem_mib(resources["mem"]) if "mem" in resources else None
        except ValueError as error:
            raise HostFault(f"these are not the local batch system's arguments: {error}") from None
        token = pbs.request_token(resources)
        blob, bad = None, ""
        try:
            blob = None if token is None else from_token(token)
        except Refused as error:  # forged: the job gets the reason as an honest bad one does
            blob, bad = b"", str(error)
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
        )

    def finish(self, outcome: Outcome, reason: str) -> int:
        """Return 0: there is no other node to try, and the wrapper tells the user the reason."""
        return pbs.prologue_exit(outcome, elsewhere=False)

    def alive(self, ids: Sequence[str]) -> Mapping[str, Life]:
        """Look into the spool, which is right also while the service is down."""
        try:
            states = {job.id: job.state for job in Spool(self._spool).jobs()}
        except OSError:
            return dict.fromkeys(ids, Life.UNKNOWN)
        gone = ("C", None)
        return {each: Life.GONE if states.get(each) in gone else Life.ALIVE for each in ids}

    def hook_files(self) -> Iterable[HookFile]:
        """Return nothing: the service calls vTorque's entry points itself."""
        return ()
