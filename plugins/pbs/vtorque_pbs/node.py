"""What the node halves of Torque and OpenPBS have in common. As root, in hooks and reaper."""

from __future__ import annotations

import abc
import re
import socket
import syslog
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from vtorque_core.api import HostFault, printable
from vtorque_core.api.batch_system import BatchJob, Life, Outcome, PeerGuest, Usage
from vtorque_core.api.guest_context import ContextItem
from vtorque_core.api.node_job import Site
from vtorque_pbs import batch_commands, inside_guests
from vtorque_pbs.job_records import Attributes, jobs_of, parse_nodes
from vtorque_pbs.qsub_dialect import Dialect
from vtorque_pbs.resources import hosts
from vtorque_pbs.settings import Settings

ALIVE_TIME = 30.0  # seconds
NOTE = "vtorque: "  # what a note of ours on a node begins with

_JOB_ID = re.compile(r"[0-9]{1,12}(?:\[[0-9]{0,9}\])?(?:\.[A-Za-z0-9][A-Za-z0-9._-]*)?", re.ASCII)


class PbsNode(abc.ABC):
    """Common part of both :class:`vtorque_core.api.batch_system.NodeAdapter`."""

    note: ClassVar[tuple[str, str]]
    """What ``pbsnodes`` calls a node's note, and its option that sets it."""

    def __init__(self, site: Site, settings: Settings, dialect: Dialect) -> None:
        self._site, self._settings = site, settings
        self.home = Path(settings.home or dialect.home)
        self._dialect = dialect
        self.commands = batch_commands.Commands(settings, dialect.programs)

    def ask(self, job_id: str, timeout: float = 30.0) -> Attributes | None:
        """Return what the server says of a job, None if it knows none. Raises HostFault.

        ``timeout`` is in seconds.
        """
        answer = self.commands.ask("qstat", self._dialect.one_job, job_id, timeout=timeout)
        if answer.code == 0:
            jobs = jobs_of(self._dialect, answer.out)
            return next((job for job in jobs if job.get("Job_Id") == job_id), None)
        if re.search(self._dialect.no_job, answer.err):
            return None
        raise HostFault(f"qstat ended with {answer.code}: {answer.words}")

    def nodes(self) -> Mapping[str, Attributes]:
        """Return the batch system's nodes. Raises HostFault."""
        return parse_nodes(self.commands.tell("pbsnodes", self._dialect.all_nodes))

    @abc.abstractmethod
    def is_marked(self, node: Attributes) -> bool:
        """Return whether VM jobs may come to a node."""

    @abc.abstractmethod
    def set_mark(self, name: str, node: Attributes, healthy: bool) -> None:
        """Have VM jobs come to a node, or not. Raises HostFault."""

    @abc.abstractmethod
    def clear_mark(self, name: str, node: Attributes) -> None:
        """Take the mark away. Raises HostFault."""

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Return the guests' node file, ``pbsdsh``, and what refuses ``qsub`` and the like."""
        return inside_guests.items(job.id, guests, str(self.home / "aux"))

    def alive(self, ids: Sequence[str]) -> Mapping[str, Life]:
        """Ask the server; a job that runs on other nodes than this one is gone from here.

        All questions together have :data:`ALIVE_TIME`: a start waits for the answer.
        """
        found: dict[str, Life] = dict.fromkeys(ids, Life.UNKNOWN)
        deadline = time.monotonic() + ALIVE_TIME
        for each in filter(_JOB_ID.fullmatch, ids):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                job = self.ask(each, left)
            except HostFault:
                continue
            found[each] = Life.GONE if job is None else self._life(job)
        return found

    def account(self, job_id: str, usage: Usage) -> None:
        """Log it: neither server takes numbers for a job from others than its pbs_mom."""
        text = f"{job_id}: guests used {usage.cpu_seconds:.0f} s CPU, {usage.peak_mib} MiB"
        syslog.syslog(syslog.LOG_INFO, f"vtorque {text}")

    def _life(self, job: Attributes) -> Life:
        if job.get("job_state") in ("C", "F", "X"):
            return Life.GONE
        nodes, _ = hosts(job.get("exec_host", ""))
        if job.get("job_state") in ("R", "E") and nodes and not self.own_name(nodes):
            return Life.GONE
        return Life.ALIVE

    def own_name(self, nodes: Iterable[str]) -> str:
        """Return which of these is this node's name in the batch system, "" if none is."""
        host = self._settings.node or socket.gethostname()
        short = host.partition(".")[0]
        by_short = {node.partition(".")[0]: node for node in nodes}
        return host if host in by_short.values() else by_short.get(short, "")

    def this_node(self) -> tuple[str, Attributes]:
        """Return this node's name and what the server says of it. Raises HostFault."""
        nodes = self.nodes()
        name = self.own_name(nodes)
        if not name:
            host = self._settings.node or socket.gethostname()
            raise HostFault(
                f"the batch system has no node {host}; if it calls this host otherwise, set "
                "[plugin.pbs] node"
            )
        return name, nodes[name]

    def elsewhere(self, job: BatchJob) -> bool:
        """Return whether enough other nodes take VM jobs for this one. Raises HostFault."""
        usable = [
            name
            for name, node in self.nodes().items()
            if name != job.node
            and self.is_marked(node)
            and not {"down", "offline"} & set(node.get("state", "").split(","))
        ]
        return len(usable) >= len(job.nodes)

    def mark(self, healthy: bool, reason: str) -> None:
        """Have VM jobs come to this node or not, and note why not. Raises HostFault."""
        if not self._settings.property:
            raise HostFault("[plugin.pbs] property is empty: nodes have no mark")
        name, node = self.this_node()
        if self.is_marked(node) != healthy:
            self.set_mark(name, node, healthy)
        self._set_note(name, node, "" if healthy else note_of(reason))

    def unmark(self) -> None:
        """Take the mark away, and a note of ours. Raises HostFault."""
        name, node = self.this_node()
        self.clear_mark(name, node)
        self._set_note(name, node, "")

    def _set_note(self, name: str, node: Attributes, text: str) -> None:
        """Set what a node's note says, or clear it; the site's own stays. Raises HostFault."""
        attribute, option = self.note
        there = node.get(attribute, "")
        if there.startswith(NOTE) or (text and not there):
            self.commands.tell("pbsnodes", option, text, name)

    def try_elsewhere(self, job: BatchJob, outcome: Outcome, reason: str) -> bool:
        """Return whether the job can be tried again; keep VM jobs off a node that is at fault.

        A node that need not be at fault stays as it is, and the job may come back to it. One that
        waits for what others have needs no other node.
        """
        if outcome is Outcome.IN_USE:
            return True
        if not (outcome.may_run_elsewhere and self._settings.property):
            return False  # without a property nothing would keep the job from coming back here
        try:
            if outcome is Outcome.HOST_FAULT:
                self.mark(False, reason)
            return self.elsewhere(job)
        except HostFault as error:
            self.log(job, f"this node stays open for VM jobs: {error}")
            return False

    def is_last_attempt(self, job: BatchJob, outcome: Outcome) -> bool:
        """Return whether the job has been started as often as the site allows.

        One that waits for others' jobs goes on waiting; but its starts count.
        """
        return outcome is not Outcome.IN_USE and job.attempt + 1 >= self._settings.attempts

    def log(self, job: BatchJob, text: str) -> None:
        """Say something to the admin."""
        syslog.syslog(syslog.LOG_WARNING, f"vtorque {job.id}: {printable(text, 1000)}")


def note_of(reason: str) -> str:
    """Return a reason as a node's note: short, plain, and known as ours."""
    plain = re.sub(r"[^ -~]|[\"'\\]", " ", reason)
    return (NOTE + " ".join(plain.split()))[:200]
