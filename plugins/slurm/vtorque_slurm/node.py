"""Slurm adapter for root on a node: Prolog, Epilog and queries from the reaper.

See slurm.conf(5), Prolog. Epilog starts only after Prolog has ended, even if the job is canceled
meanwhile (measured on 22.05).
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import HostFault, Paths, Refused, name_errors, printable
from vtorque_core.api.batch_system import (
    BareNode,
    BatchJob,
    JobState,
    NodeAdapter,
    Outcome,
    PeerGuest,
)
from vtorque_core.api.guest_context import ContextItem
from vtorque_core.api.kept_records import Usage
from vtorque_core.api.submission import from_token
from vtorque_slurm import (
    controller_updates,
    cpus,
    hostlist,
    inside_guests,
    launch_failure,
    placeholder_job,
    request_channel,
    slurm_conf,
)
from vtorque_slurm.batch_commands import SlurmClient
from vtorque_slurm.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site
    from vtorque_core.api.setup_steps import Installation, SetupStep

# Compact states (squeue(1), JOB STATE CODES) of jobs that may still use resources on a node.
_ALIVE = "PD,R,S,CF,CG,ST,RD,RF,RH,RQ,RS,SI,SE,SO"
_TRIES = 3  # retries, because another node may overwrite the comment at the same time


class SlurmNode(NodeAdapter):
    """Implementation of :class:`vtorque_core.api.batch_system.NodeAdapter` for Slurm."""

    def __init__(self, settings: Settings, journal: Path, proofs: Path) -> None:
        self._settings = settings
        self._places = (journal, proofs)
        self._paths = Paths(journal.parent, proofs.parent)
        self._client = SlurmClient(settings)
        self._no_job_shell = False  # slurmd would start the job's script on the host

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read the job from Prolog's environment. For a VM job, also query its CPUs and memory."""
        with name_errors("this is not the environment of Slurm's Prolog", KeyError, ValueError):
            job_id, node = environ["SLURM_JOB_ID"], environ["SLURMD_NODENAME"]
            owner, uid = environ["SLURM_JOB_USER"], int(environ["SLURM_JOB_UID"])
            nodes = hostlist.expand(environ["SLURM_NODELIST"])
            if not job_id.isdecimal() or node not in nodes:
                raise ValueError(f"invalid job {job_id!r}, or unknown node {node!r}")
            attempt = int(environ.get("SLURM_JOB_RESTART_COUNT") or 0)
        self._client = SlurmClient(self._settings, environ)
        leader = environ.get("SLURM_HET_JOB_ID", job_id)
        word = request_channel.find(environ.get("SLURM_JOB_COMMENT", ""))
        by_spank = None
        if word is None and leader == job_id:  # sbatch gives the variable to all components
            by_spank = word = environ.get(request_channel.FROM_SPANK)
        if word is None:
            return BatchJob(job_id, owner, node, nodes, None)
        blob, bad, record, unknown = b"", "", None, ""
        bare: tuple[BareNode, ...] = ()
        slots = _slots(environ, len(nodes))
        account = environ.get("SLURM_JOB_ACCOUNT", "")
        try:
            owner = request_channel.trusted_owner(owner, uid)
            blob = self._request(job_id, word)
            if leader != job_id:
                raise Refused("only the first component of a heterogeneous job has guests")
            if by_spank:
                self._require_spank_plugin()
            record = controller_updates.record(self._client, job_id, account)
            if record.name == f"{job_id}+0":
                bare = controller_updates.bare_nodes(self._client, job_id)
        except Refused as error:
            bad = str(error)
        except HostFault as error:
            unknown = str(error)
        ids = record.cpus.get(node, ()) if record else ()
        if record and record.cpus.keys() >= set(nodes):
            slots = tuple(len(record.cpus[each]) for each in nodes)
        return BatchJob(
            id=job_id,
            owner=owner,
            node=node,
            nodes=nodes,
            blob=blob,
            attempt=attempt,
            cpus=cpus.kernel_ids(ids) if self._settings.cpu_ids else (),
            cpu_count=len(ids) or (slots[nodes.index(node)] if slots else None),
            cpu_counts=slots,
            mem_mib=(record.mib.get(node) or None) if record else None,
            resource_list={"walltime": record.limit} if record else {},
            bad_request=bad,
            unknown=unknown,
            whole_node=record is not None and record.sharing == "NO",
            whole_user=record is not None and record.sharing == "USER",
            partition=environ.get("SLURM_JOB_PARTITION", ""),
            account=account,
            qos=record.qos if record else "",
            known_as=record.name.partition("+")[0] if record else "",
            granted=record.granted.get(node, {}) if record else {},
            bare=bare,
        )

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Return Slurm's variables and commands for guests."""
        return inside_guests.items(job, guests)

    def finish(self, job: BatchJob, outcome_: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Report the outcome to Slurm, and return Prolog's exit status.

        The status is 0 even after a failure, because Slurm drains the node of a failed Prolog. It
        is 1 only if slurmd would otherwise start the job without the job shell. A background
        process then undrains the node.
        """
        if outcome_.may_run_elsewhere:
            try:
                if outcome_ is Outcome.IN_USE:
                    controller_updates.requeue_in_use(self._client, job, reason)
                else:
                    controller_updates.host_fault(self._client, self._settings, job, reason)
            # The job shell prints the reason, and ends the job.
            except (HostFault, Refused) as error:
                sys.stderr.write(f"vtorque: {printable(str(error), 500)}\n")
        if self._no_job_shell:
            controller_updates.undrain_after_prolog(self._client, job.node)
        return int(self._no_job_shell)

    def job_states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Return the states of these jobs; one squeue query covers all jobs that have not ended."""
        argv = ("squeue", "--all", "--noheader", "--array", f"--states={_ALIVE}", "--format=%A %T")
        try:
            words = self._client.run(*argv).split()
        except HostFault:
            return dict.fromkeys(ids, JobState.UNKNOWN)
        states = dict(zip(words[::2], words[1::2], strict=False))
        lives = {"": JobState.GONE, "SUSPENDED": JobState.SUSPENDED}
        return {each: lives.get(states.get(each, ""), JobState.ALIVE) for each in ids}

    def reserve_node(self, job_id: str, nodes: Sequence[str], left: str, node: str) -> BatchJob:
        """Reserve this node's resources for a migrating guest, with a placeholder job of root."""
        return placeholder_job.receive(self, self._client, job_id, nodes, left, node)

    def release_node(self, job_id: str, node: str) -> None:
        """Cancel the placeholder job that holds resources for a migrated guest."""
        placeholder_job.let_go(self._client, job_id, node)

    def is_reserved(self, job_id: str, node: str) -> bool:
        """Return whether a placeholder job holds resources on the node for a migrated guest."""
        return placeholder_job.has_placeholder(self._client, job_id, node)

    def remove_node(self, job_id: str, node: str) -> None:
        """Remove the node from the job's allocation."""
        placeholder_job.remove_node(self._client, job_id, node)

    def has_ended(self, job_id: str, attempt: int) -> bool:
        """Return whether this attempt of the job has ended or its Epilog is running."""
        return placeholder_job.has_ended(self._client, job_id, attempt)

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return the steps that install the hooks and check slurm.conf."""
        from vtorque_slurm.setup import steps  # noqa: PLC0415 - only for setup

        return steps(self._settings, place, *self._places)

    def mark(self, healthy: bool, reason: str) -> None:
        """Set or clear the site's feature on this node, with the reason in the node's comment."""
        controller_updates.mark(self._client, self._settings.feature, healthy, reason)

    def drain(self, reason: str) -> None:
        """Drain this node, unless the site has already drained it."""
        controller_updates.drain(self._client, reason)

    def drained(self) -> tuple[str, Mapping[str, str]]:
        """Return this node's name, and the drain reason of each node that vTorque drained."""
        return controller_updates.drained_nodes(self._client)

    def undrain(self) -> None:
        """Undrain this node if vTorque drained it."""
        controller_updates.undrain(self._client)

    def requeue(self, job_id: str) -> None:
        """Requeue a job. Slurm refuses interactive jobs and jobs with --no-requeue."""
        controller_updates.requeue(self._client, job_id)

    def account(self, job_id: str, usage: Usage) -> None:
        """Append the job's usage of this node to its AdminComment, if the site uses slurmdbd.

        The comment is changed in slurmdbd, because the controller accepts no comment on an ended
        job (22.05). If Slurm did not start the script, also record the reason in the job's kept
        records. Slurm does not account for QEMU, because QEMU runs in a control group of libvirt.
        Moving QEMU to the job's extern step needs Slurm's library, and libvirt could then no longer
        pin vCPUs.
        """
        launch_failure.keep(self._client, self._paths, job_id)
        if "slurmdbd" not in slurm_conf.value(Path(self._settings.conf), "AccountingStorageType"):
            return
        line = f"vtorque {controller_updates.this_node(self._client)}: "
        line += f"cpu={usage.cpu_seconds:.0f}s mem={usage.peak_mib}M"
        for left in reversed(range(_TRIES)):
            if controller_updates.add_to_accounting(self._client, job_id, line):
                return
            if left:  # another node may have overwritten the line, so read it again
                time.sleep(random.uniform(0.1, 0.5))  # noqa: S311

    def _require_spank_plugin(self) -> None:
        from vtorque_slurm.spank import installation  # noqa: PLC0415 - only for jobs with --vm=

        if reason := installation.problem(self._settings, self._client):
            self._no_job_shell = True
            raise HostFault(f"Slurm does not start the job shell of --vm= jobs: {reason}")

    def _request(self, job_id: str, word: str) -> bytes:
        if word == request_channel.IN_SCRIPT:
            text = self._client.ask("scontrol", "write", "batch_script", job_id, "-")
            word = request_channel.find_in_script(text.encode("utf-8", "surrogateescape")) or ""
        return from_token(word)


def _slots(environ: Mapping[str, str], nodes: int) -> tuple[int, ...]:
    try:
        found = hostlist.counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    except ValueError:
        return ()
    return found if len(found) == nodes else ()


def create_node(site: Site) -> SlurmNode:
    """Return the node adapter."""
    return SlurmNode(site[Settings], site.paths.journal, site.paths.proof("0").parent)
