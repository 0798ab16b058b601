"""Common part of the node adapters for Torque and OpenPBS.

Privileges: root, in hooks and the reaper. Methods raise HostFault if a command fails.
"""

from __future__ import annotations

import abc
import re
import socket
import syslog
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from vtorque_core.api import HostFault, JobAttempt, Refused, printable
from vtorque_core.api.batch_system import BatchJob, JobState, Outcome, PeerGuest
from vtorque_core.api.guest_context import ContextItem
from vtorque_core.api.kept_records import Usage
from vtorque_core.api.node_job import Site
from vtorque_pbs import batch_commands, inside_guests
from vtorque_pbs.job_records import Attributes, parse_jobs, parse_nodes
from vtorque_pbs.qsub_dialect import PbsDialect
from vtorque_pbs.resources import hosts
from vtorque_pbs.settings import Settings

ALIVE_TIME = 30.0  # seconds
NOTE = "vtorque: "  # prefix of vTorque's notes on nodes and comments on jobs
_DRAINED = "drained: "  # follows NOTE if the node is drained
PATIENCE = 15.0  # seconds that a start waits for an ending job
PAUSE, LONGEST = 30, 900  # seconds until a job is restarted: first delay (doubles), longest delay

_JOB_ID = re.compile(r"[0-9]{1,12}(?:\[[0-9]{0,9}\])?(?:\.[A-Za-z0-9][A-Za-z0-9._-]*)?", re.ASCII)


def is_job_id(text: str) -> bool:
    """Return whether the text can be a job's id, and is safe as a file name."""
    return _JOB_ID.fullmatch(text) is not None


def is_one_part(text: str) -> bool:
    """Return whether a ``nodes`` or ``select`` value has no ``+`` and is safe as part of ``-l``."""
    return re.fullmatch(r"[][A-Za-z0-9._:=#-]+", text, re.ASCII) is not None


class PbsNode(abc.ABC):
    """Base class of the node adapters for Torque and OpenPBS."""

    note: ClassVar[tuple[str, str]]
    """Attribute of a node's note in ``pbsnodes``, and the option that sets it."""
    online: ClassVar[str]
    """Option of ``pbsnodes`` that sets a node online."""

    def __init__(self, site: Site, settings: Settings, dialect: PbsDialect) -> None:
        self._site, self._settings = site, settings
        self.home = Path(settings.home or dialect.home)
        self._dialect = dialect
        self.commands = batch_commands.Commands(settings, dialect.programs)

    def ask(self, job_id: str, timeout: float = 30.0) -> Attributes | None:
        """Return the server's attributes of a job, or None for an unknown job.

        ``timeout`` is in seconds.
        """
        answer = self.commands.ask("qstat", self._dialect.one_job, job_id, timeout=timeout)
        if answer.code == 0:
            jobs = parse_jobs(self._dialect, answer.out)
            return next((job for job in jobs if job.get("Job_Id") == job_id), None)
        if re.search(self._dialect.no_job, answer.err):
            return None
        raise HostFault(f"qstat ended with exit code {answer.code}: {answer.words}")

    def nodes(self) -> Mapping[str, Attributes]:
        """Return the attributes of the batch system's nodes."""
        return parse_nodes(self.commands.run_checked("pbsnodes", self._dialect.all_nodes))

    @abc.abstractmethod
    def is_marked(self, node: Attributes) -> bool:
        """Return whether a node accepts VM jobs."""

    @abc.abstractmethod
    def set_mark(self, name: str, node: Attributes, healthy: bool) -> None:
        """Enable or disable a node for VM jobs."""

    @abc.abstractmethod
    def clear_mark(self, name: str, node: Attributes) -> None:
        """Remove the mark from a node."""

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Return the guests' node file, ``pbsdsh``, and substitutes for other PBS commands."""
        return inside_guests.items(job, guests, str(self.home / "aux"))

    def job_states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Return the states of these jobs. A job that runs only on other nodes counts as gone.

        All queries together take at most :data:`ALIVE_TIME`, because the start of a job waits for
        the result.
        """
        return self.alive_and_held(ids)[0]

    def alive_and_held(
        self, ids: Collection[str]
    ) -> tuple[Mapping[str, JobState], Collection[str]]:
        """Return the result of :meth:`job_states`, and which running jobs are held (``qhold``)."""
        found, held = dict.fromkeys(ids, JobState.UNKNOWN), set()
        deadline = time.monotonic() + ALIVE_TIME
        for each in filter(is_job_id, ids):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                job = self.ask(each, left)
            except HostFault:
                continue
            found[each] = JobState.GONE if job is None else self._life(job)
            if job and job.get("job_state") == "R" and _is_held(job):
                held.add(each)
        return found, held

    def account(self, job_id: str, usage: Usage) -> None:
        """Log the usage. Hooks cannot write accounting records (doc/batch-pbs.md, Limits)."""
        text = f"{job_id}: guests used {usage.cpu_seconds:.0f} s CPU, {usage.peak_mib} MiB"
        syslog.syslog(syslog.LOG_INFO, f"vtorque {text}")

    def _life(self, job: Attributes) -> JobState:
        if job.get("job_state") in ("C", "F", "X"):
            return JobState.GONE
        nodes, _ = hosts(job.get("exec_host", ""))
        if job.get("job_state") in ("R", "E") and nodes and not self.own_name(nodes):
            return JobState.GONE
        return JobState.SUSPENDED if job.get("job_state") == "S" else JobState.ALIVE

    def own_name(self, nodes: Iterable[str]) -> str:
        """Return this node's name in the batch system; empty if it is not among ``nodes``."""
        host = self._settings.node or socket.gethostname()
        short = host.partition(".")[0]
        by_short = {node.partition(".")[0]: node for node in nodes}
        return host if host in by_short.values() else by_short.get(short, "")

    def this_node(self) -> tuple[str, Attributes]:
        """Return this node's name and attributes."""
        nodes = self.nodes()
        name = self.own_name(nodes)
        if not name:
            host = self._settings.node or socket.gethostname()
            raise HostFault(
                f"the batch system has no node {host}; if it lists this host by another name, set "
                "[plugin.pbs] node"
            )
        return name, nodes[name]

    def other_vm_nodes(self) -> list[str]:
        """Return the other nodes that accept VM jobs."""
        nodes = self.nodes()
        here = self.own_name(nodes)
        return [name for name, node in nodes.items() if name != here and self.is_marked(node)]

    def be_last(self) -> None:
        """Raise HostFault if other nodes accept VM jobs, and thus need the server's hooks."""
        if names := self.other_vm_nodes():
            raise HostFault(
                f"nodes still use this server: {', '.join(names[:5])}{', ...' * (len(names) > 5)}; "
                "run vtorque setup uninstall on these nodes first, and on the server's host last"
            )

    def mark(self, healthy: bool, reason: str) -> None:
        """Enable or disable this node for VM jobs. A disabled node gets the reason as its note."""
        if not self._settings.property:
            raise HostFault("[plugin.pbs] property is empty, so nodes cannot be marked")
        name, node = self.this_node()
        if self.is_marked(node) != healthy:
            self.set_mark(name, node, healthy)
        if self._why_drained(node) is None:
            self._set_note(name, node, "" if healthy else format_note(reason))

    def drain(self, reason: str) -> None:
        """Set this node offline with the reason as its note."""
        name, node = self.this_node()
        self._set_note(name, node, format_note(_DRAINED + reason))
        self.commands.run_checked("pbsnodes", "-o", name)

    def drained(self) -> tuple[str, Mapping[str, str]]:
        """Return this node's name, and the drain reason of each node that vTorque set offline.

        Raises:
            Refused: This node is online, but cannot be drained: the site has set its note, in which
                vTorque would record the drain.
        """
        name, here = self.this_node()
        note, offline = here.get(self.note[0], ""), "offline" in here.get("state", "").split(",")
        if note and not note.startswith(NOTE) and not offline:
            raise Refused(
                f"node {name} already has a comment, so vTorque cannot record the drain: remove "
                "the comment"
            )
        found = {name: self._why_drained(node) for name, node in self.nodes().items()}
        return name, {node: why for node, why in found.items() if why is not None}

    def undrain(self) -> None:
        """Set this node online again and clear the note, if vTorque drained it."""
        name, node = self.this_node()
        if self._why_drained(node) is not None:
            self.commands.run_checked("pbsnodes", self.online, name)
            self._set_note(name, node, "")

    def _why_drained(self, node: Attributes) -> str | None:
        text, begins = node.get(self.note[0], ""), NOTE + _DRAINED
        offline = "offline" in node.get("state", "").split(",")
        return text.removeprefix(begins) if offline and text.startswith(begins) else None

    def start_again(self, job: JobAttempt, reason: str) -> None:
        """Requeue the job with a delay, or hold it after its last attempt; see :meth:`finish`."""
        known = self.ask(job.id)
        if known is None:
            return
        node = job.node or socket.gethostname()
        how = {
            "interactive": known.get("interactive", "False"),
            "rerunable": known.get("Rerunable", "True"),
        }
        again = BatchJob(job.id, job.owner, node, (node,), None, job.attempt, resource_list=how)
        self.finish(again, Outcome.NOT_HERE, reason, hook_waits=False)

    def requeue(self, job_id: str) -> None:
        """Requeue a job. The server refuses jobs submitted with ``qsub -r n``."""
        self.commands.rerun(job_id)

    def requeue_here(self, job_id: str) -> None:
        """Requeue a held single-node job, and restrict it to this node, which has its checkpoint.

        Raises:
            Refused: The job's hold (``qhold``) was released meanwhile, so the job continues to run;
                or :meth:`restrict_to_node` refuses its request.
        """
        job = self.ask(job_id) or {}
        if not _is_held(job):
            raise Refused(f"job {job_id} is no longer held")
        node = self.own_name(hosts(job.get("exec_host", ""))[0])
        self.commands.rerun(job_id, self.restrict_to_node(job, node))

    @abc.abstractmethod
    def restrict_to_node(self, job: Attributes, node: str) -> str:
        """Return the job's request as a value of ``-l``, restricted to one node.

        Raises:
            Refused: The request cannot be restricted, for example because it has several chunks.
        """

    def unmark(self) -> None:
        """Remove the mark and vTorque's note."""
        name, node = self.this_node()
        self.clear_mark(name, node)
        self._set_note(name, node, "")

    def _set_note(self, name: str, node: Attributes, text: str) -> None:
        """Set or clear the node's note. A note written by the site is kept."""
        attribute, option = self.note
        there = node.get(attribute, "")
        if there.startswith(NOTE) or (text and not there):
            self.commands.run_checked("pbsnodes", option, text, name)

    def finish(self, job: BatchJob, outcome: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Requeue the job if its start failed and may succeed later or on another node.

        The requeued job waits for a delay or, after its last attempt, is held. After a host fault,
        this node no longer accepts VM jobs. ``hook_waits`` is False if the hook has already
        returned.

        Returns:
            The hook's exit status, which is not 0 for a requeued job. After status 0, the job shell
            runs, and reports the reason of a failure.
        """
        if not outcome.may_run_elsewhere:
            return 0
        if outcome is not Outcome.IN_USE and not self._keeps_off(job, outcome, reason):
            return 0
        if job.resource_list.get("interactive", "0") not in ("0", "False", "None"):
            return 0  # only the job shell can print the reason on its terminal
        if not hook_waits and job.resource_list.get("rerunable") in ("0", "False"):
            return 0  # the server would refuse qrerun
        try:
            self._requeue_later(job, outcome, reason)
            return self.requeue_now(job, hook_waits)
        except HostFault as error:
            self.log(job, f"the job cannot be requeued: {error}")
            return 0

    @abc.abstractmethod
    def requeue_now(self, job: BatchJob, hook_waits: bool) -> int:
        """Requeue the job now, and return the hook's exit status (not 0)."""

    def _keeps_off(self, job: BatchJob, outcome: Outcome, reason: str) -> bool:
        """Keep VM jobs off this node after a host fault; return whether the job may be requeued.

        To keep VM jobs off, remove the node's mark. If ``outcome`` is not a host fault, leave the
        mark: the requeued job may start on this node again.

        Returns:
            False if the site uses no mark, or if the mark cannot be removed. Otherwise True.
        """
        if not self._settings.property:
            return False
        try:
            if outcome is Outcome.HOST_FAULT:
                self.mark(False, reason)
        except HostFault as error:
            self.log(job, f"this node still accepts VM jobs: {error}")
            return False
        return True

    def _requeue_later(self, job: BatchJob, outcome: Outcome, reason: str) -> None:
        """Delay the job's next start, or hold the job after its last attempt; set the comment.

        A job that found a resource in use is only delayed, never held. Both servers let a manager
        set comment and start time (``qalter -a``) of a running job, and keep both after a requeue
        (tested).
        """
        if outcome is not Outcome.IN_USE and job.attempt + 1 >= self._settings.attempts:
            self.commands.run_checked("qhold", "-h", "s", job.id)
            why = (
                f"held after {job.attempt + 1} starts; when the problem is fixed: qrls -h s "
                f"{job.id}; {reason}"
            )
            self.log(job, why)
            self.commands.run_checked("qalter", "-W", f"comment={format_note(why)}", job.id)
            return
        until = time.localtime(time.time() + min(PAUSE << min(job.attempt, 10), LONGEST))
        why = format_note(f"next start at {time.strftime('%H:%M:%S', until)}; {reason}")
        words = ("-a", time.strftime("%Y%m%d%H%M.%S", until), "-W", f"comment={why}")
        self.commands.run_checked("qalter", *words, *self.reset_arguments(job, outcome), job.id)

    def reset_arguments(self, job: BatchJob, outcome: Outcome) -> Sequence[str]:
        """Return qalter arguments that set the server's start counter back, if necessary."""
        return ()

    def log(self, job: BatchJob, text: str) -> None:
        """Log a warning for the admin."""
        syslog.syslog(syslog.LOG_WARNING, f"vtorque {job.id}: {printable(text, 1000)}")


def _is_held(job: Attributes) -> bool:
    return job.get("Hold_Types", "n") != "n"


def format_note(reason: str) -> str:
    """Format a reason as a short, plain note or job comment with vTorque's prefix."""
    plain = re.sub(r"[^ -~]|[\"'\\]", " ", reason).replace(",", ";")  # qalter splits -W there
    return (NOTE + " ".join(plain.split()))[:200]
