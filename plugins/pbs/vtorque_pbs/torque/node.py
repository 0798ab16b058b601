"""Torque adapter for root on a node, called by :mod:`vtorque_pbs.torque.hooks`."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import HostFault, Refused, name_errors
from vtorque_core.api.batch_system import BatchJob, Detach, Outcome
from vtorque_core.api.host_topology import parse_cpus
from vtorque_core.api.node_job import Site
from vtorque_pbs import convention as pbs
from vtorque_pbs import countable_resources, request_channel
from vtorque_pbs.batch_commands import REQUEUE_TIME
from vtorque_pbs.job_records import Attributes, parse_nodes
from vtorque_pbs.mixed_requests import (
    JobPart,
    bare_nodes,
    per_node,
    select_guest_parts,
    torque_places,
)
from vtorque_pbs.node import PATIENCE, PbsNode, is_one_part
from vtorque_pbs.qsub_dialect import TORQUE
from vtorque_pbs.resources import hosts, parse_exec_host, torque_memory, walltime_seconds
from vtorque_pbs.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.setup_steps import Installation, SetupStep

FIRST, SISTER = "first", "sister"  # first argument of the hooks' calls, before Torque's arguments
RETRY = 75  # EX_TEMPFAIL (sysexits.h): the hook exits with Torque's 2; for all other codes with 0

TRIES, PAUSE = 3, 2.0  # queries to a busy server; seconds between them
_QALTER_TIME = 5.0  # seconds for an answer that Torque 6.1.3.h4 and later never send

_SCRIPT_ON_METAL = (
    "Torque has placed a part on bare metal on the job's first node, where the script would run: "
    "name the first part's node (-l nodes=NODE:ppn=...), or ask the admin to put nodes for "
    "virtual machines last in Torque's list of nodes"
)
_CPUSETS = ("/sys/fs/cgroup/cpuset/torque/{}/cpuset.cpus", "/dev/cpuset/torque/{}/cpus")


class TorqueNode(PbsNode):
    """Implementation of :class:`vtorque_core.api.batch_system.NodeAdapter` for Torque."""

    note = ("note", "-N")
    online = "-c"

    def __init__(self, site: Site, settings: Settings) -> None:
        super().__init__(site, settings, TORQUE)
        self._began = time.monotonic()

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Parse a prologue's arguments. For a VM job, also query the server.

        Raises:
            HostFault: The arguments or the server's answer are invalid. The hook then lets the job
                start, and the job shell ends the job because the proof is missing.
        """
        kind, *rest = argv or ("",)
        with name_errors("invalid arguments from Torque", ValueError):
            if kind not in (FIRST, SISTER):
                raise ValueError("the hook's name is missing before the arguments")
            args = pbs.PrologueArgs.parse(rest)
        asked = pbs.parse_resources(args.resources)
        word = request_channel.torque_word(asked)
        if word is None:
            host = self._settings.node or socket.gethostname()
            return BatchJob(args.job_id, args.user, host, (host,), None, name=args.job_name)
        known = self._find_job(args.job_id)
        all_nodes, _ = hosts(known.get("exec_host", ""))
        node = self.own_name(all_nodes)
        if not node:
            where = known.get("exec_host", "none")
            raise HostFault(f"job {args.job_id} does not run on this node; its exec_host: {where}")
        blob, bad, unknown = b"", "", ""
        places = [
            JobPart(*part, guests=True) for part in parse_exec_host(known.get("exec_host", ""))
        ]
        try:
            places = self._places(known, places)
            if places[0].node not in per_node(places)[0]:
                raise Refused(_SCRIPT_ON_METAL)
        except Refused as error:
            bad, places = str(error), [replace(place, guests=True) for place in places]
        except HostFault as error:
            unknown = str(error)
        (nodes, slots), bare = per_node(places), bare_nodes(places)
        if node not in nodes:
            return BatchJob(args.job_id, args.user, node, (node,), None, name=args.job_name)
        try:
            blob = request_channel.torque_blob(word, known.get("Variable_List", ""))
        except Refused as error:
            bad = bad or str(error)
        given, count = _resources(known), slots[nodes.index(node)]
        policy = given.get("naccesspolicy", "").lower() if self._has_policies else ""
        return BatchJob(
            id=args.job_id,
            owner=args.user,
            node=node,
            nodes=nodes,
            blob=blob,
            attempt=max(_number(known.get("start_count")) - 1, 0),
            cpus=_cpuset(args.job_id),
            cpu_count=count,
            cpu_counts=slots,
            mem_mib=torque_memory(given, count, len(all_nodes)),
            name=args.job_name,
            resource_list={
                **asked,
                "interactive": known.get("interactive", "False"),
                "rerunable": known.get("Rerunable", "True"),
            },
            bad_request=bad,
            unknown=unknown,
            bare=bare,
            detach=Detach.AT_ONCE if kind == SISTER else Detach.PLACED,
            whole_node=policy == "singlejob" or self._is_filled(node, given, count),
            whole_user=policy == "singleuser",
            # Only the prologue's exit code requeues a job of "qsub -r n"; qrerun is refused for it.
            patience=0.0 if known.get("Rerunable") == "False" else PATIENCE,
            queue=args.queue,
            account=args.account,
            granted=countable_resources.torque_granted(
                "" if node in {each.name for each in bare} else known.get("exec_gpus", ""),
                known.get("Resource_List.nodes", ""),
                node,
            ),
        )

    def _places(self, known: Attributes, placed: list[JobPart]) -> list[JobPart]:
        asked, feature = known.get("Resource_List.nodes", ""), self._settings.property
        if all(select_guest_parts(asked.partition("#")[0].split("+"), feature)):
            return placed
        has = {name: _properties(node) for name, node in self.nodes().items()}
        return torque_places(asked, [(p.node, p.slots) for p in placed], feature, has)

    def finish(self, job: BatchJob, outcome: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Add the boot time to the walltime if the guests are ready, then call the base method."""
        if outcome is Outcome.READY and not hook_waits and job.node_index == 0:
            try:
                self._extend_walltime(job)
            except HostFault as error:
                self.log(job, f"the walltime includes the time to boot the guests: {error}")
        return super().finish(job, outcome, reason, hook_waits=hook_waits)

    def _extend_walltime(self, job: BatchJob) -> None:
        """Extend the job's walltime by the time since this hook began.

        Root is a manager of the server. Torque 6.1.3.h4 and later change the walltime of a running
        job, but send no answer: validate_jobid_to_socket in issue_request.c reads a wrong field of
        the request to pbs_mom. Therefore the new walltime is read back.
        """
        asked = self._walltime(job)  # the owner may have changed it meanwhile
        if asked is None:
            return
        wanted = math.ceil(asked + time.monotonic() - self._began)
        text = f"walltime={pbs.show_walltime(wanted)}"
        try:
            self.commands.run_checked("qalter", "-l", text, job.id, timeout=_QALTER_TIME)
        except HostFault:
            if self._walltime(job) != wanted:
                raise

    def _walltime(self, job: BatchJob) -> float | None:
        return walltime_seconds((self.ask(job.id) or {}).get("Resource_List.walltime", ""))

    def requeue_now(self, job: BatchJob, hook_waits: bool) -> int:
        """Return the exit status with which the hook requeues the job.

        If the hook has already returned, also ask the server to requeue the job.
        """
        if not hook_waits:
            self.commands.rerun(job.id, wait=REQUEUE_TIME)
        return RETRY

    def set_mark(self, name: str, node: Attributes, healthy: bool) -> None:
        """Add the mark, a property, to a healthy node. On a faulty node, set ``no<mark>`` instead.

        The last node with the mark keeps it, because pbs_sched deletes queued jobs that no node
        could run ("would never run").
        """
        words = self._settings.property, f"no{self._settings.property}"
        if healthy:
            self._swap(name, node, *words)
        elif self.other_vm_nodes():
            self._swap(name, node, *reversed(words))
            if not self.other_vm_nodes():  # another node did the same at the same time
                self._swap(name, self.nodes()[name], *words)

    def clear_mark(self, name: str, node: Attributes) -> None:
        """Remove the mark, a property."""
        feature = self._settings.property
        if self.is_marked(node):
            others = set(_properties(node)) - {feature, f"no{feature}"}
            self._swap(name, node, "" if others else f"no{feature}", feature)

    def is_marked(self, node: Attributes) -> bool:
        """Return whether the node has the mark, a property."""
        return self._settings.property in _properties(node)

    def restrict_to_node(self, job: Attributes, node: str) -> str:
        """Replace the node count 1 in the job's ``nodes`` request with the name ``node``."""
        asked = job.get("Resource_List.nodes", "")
        count, colon, rest = asked.partition(":")
        if count not in ("1", node) or not is_one_part(asked):
            raise Refused(
                f"a job with -l nodes={asked} cannot be requeued on this node: request nodes=1"
            )
        return f"nodes={node}{colon}{rest}"

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return the steps that set up this node.

        They write the hooks, set pbs_mom's ``$prologalarm``, check that root is a manager of the
        server, and add the mark, a property.
        """
        from vtorque_pbs.torque.setup import steps  # noqa: PLC0415 (not for every job)

        return steps(self, self._site, self._settings, place)

    @property
    def _has_policies(self) -> bool:
        """True if the site gets exclusive nodes with ``naccesspolicy`` of Moab or Maui."""
        return self._settings.exclusive.startswith("naccesspolicy=")

    def _is_filled(self, node: str, given: Mapping[str, str], count: int) -> bool:
        if "shared" in given.get("nodes", "").partition("#")[2]:
            return False
        try:
            shown = parse_nodes(self.commands.run_checked("pbsnodes", "-a", node))
        except HostFault:
            return False
        return 0 < _number(shown.get(node, {}).get("np")) <= count

    def _swap(self, name: str, node: Attributes, new: str, old: str) -> None:
        """Add the property ``new`` to a node, then remove ``old``.

        The order matters: after a node loses its last property, Torque 6.1.3 refuses all changes
        to the node with "System error: Bad file descriptor" until pbs_server is restarted.
        """
        for sign, word in (("+=", new), ("-=", old)):
            if word and (word in _properties(node)) == (sign == "-="):
                self.commands.run_checked("qmgr", "-c", f"set node {name} properties {sign} {word}")

    def _find_job(self, job_id: str) -> Attributes:
        for again in range(TRIES, -1, -1):
            try:
                found = self.ask(job_id)
            except HostFault:
                if not again:
                    raise
                time.sleep(PAUSE)
            else:
                if found is None:
                    raise HostFault(f"the server does not know job {job_id}")
                return found
        raise AssertionError


def _properties(node: Attributes) -> list[str]:
    return [each for each in node.get("properties", "").split(",") if each]


def _cpuset(job_id: str) -> tuple[int, ...]:
    for place in _CPUSETS:
        path = Path(place.format(job_id))
        if "/" not in job_id and os.access(path, os.R_OK):
            return parse_cpus(path.read_text().strip())
    return ()


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _resources(job: Attributes) -> dict[str, str]:
    start = "Resource_List."
    return {name.removeprefix(start): job[name] for name in job if name.startswith(start)}


def create_node(site: Site) -> TorqueNode:
    """Return the node adapter for Torque."""
    return TorqueNode(site, site[Settings])
