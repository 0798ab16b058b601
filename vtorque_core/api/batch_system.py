"""Interface of a batch system: Submitter, NodeAdapter and JobShell.

The Submitter runs as the user in ``vsub`` and ``vmgr``. The NodeAdapter runs as root in the batch
system's hooks. The JobShell runs as the user, where the batch system starts the job.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from vtorque_core.base.names import JobAttempt

if TYPE_CHECKING:
    from vtorque_core.api.guest_context import ContextItem
    from vtorque_core.api.setup_steps import Installation, SetupStep


class Outcome(enum.Enum):
    """Result of a prologue. The adapter reports it to the batch system.

    Attributes:
        NOT_HERE: the start failed on this node, perhaps because of the user. Treat it as
            HOST_FAULT, but do not drain the node.
        IN_USE: another job still uses resources after the prologue has waited. Requeue the job; do
            not hold it or blame the node.
    """

    READY = "ready"
    REFUSED = "refused"
    HOST_FAULT = "host_fault"
    NOT_HERE = "not_here"
    IN_USE = "in_use"
    NOT_OURS = "not_ours"

    @property
    def may_run_elsewhere(self) -> bool:
        """True if the job may be retried on another node, or later on this one."""
        return self in (Outcome.HOST_FAULT, Outcome.NOT_HERE, Outcome.IN_USE)


class Life(enum.Enum):
    """State of a job in the batch system.

    Attributes:
        SUSPENDED: the job exists, and the batch system has stopped its processes.
        UNKNOWN: the batch system does not answer. The reaper waits.
    """

    ALIVE = "alive"
    SUSPENDED = "suspended"
    GONE = "gone"
    UNKNOWN = "unknown"


class Detach(enum.Enum):
    """The moment at which the start hook returns to the batch system.

    If the guests are not ready then, a detached process continues the start, and the job shell
    waits.
    """

    #: The hook returns when the guests are ready.
    NEVER = "never"
    #: The hook returns when the job's proof file exists. Its exit code is ignored.
    AT_ONCE = "at once"
    #: The hook returns when the job has its resources on this node, or waits for resources in use
    #: by other jobs. If the start fails before that, the hook's exit code reports it.
    PLACED = "placed"


@dataclass(frozen=True)
class SubmitArgs:
    """The user's command line, split into the parts that ``vsub`` handles.

    Attributes:
        vm: all ``-vm`` values, in order.
        rest: the arguments for the batch system, in the user's order.
        script: path of the script; None: standard input, or an interactive job.
        content: the script, if the submitter had to read it from standard input.
        shell: value of ``-S``, if given.
        interactive: True for a job with a terminal.
        vcpus_given, mib_given: CPUs and MiB per node that the arguments request, if any.
        directives: the script's option lines for vTorque (``#VSUB -vm``).
        facts: requested ``queue``, ``partition``, ``account`` and ``qos``.
        resources_given: other requested countable resources per node, and licenses per job; by the
            names of :class:`Needs`.
        nodes_given: the minimum number of nodes that the arguments request, if any.
    """

    vm: tuple[str, ...]
    rest: tuple[str, ...]
    script: str | None = None
    content: bytes | None = None
    shell: str | None = None
    interactive: bool = False
    vcpus_given: int | None = None
    mib_given: int | None = None
    directives: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    resources_given: Mapping[str, int] = field(default_factory=dict)
    nodes_given: int | None = None


@dataclass(frozen=True)
class Needs:
    """Resources per node that ``vsub`` requests for a VM job, unless its user has requested them.

    Attributes:
        cpus: CPUs for the guests, for plugins and for the site's host reserve.
        mib: MiB for the guests, QEMU, plugins and the host reserve; None: the batch system's
            default for this number of CPUs.
        seconds: added to the walltime for the start of the guests.
        resources, licenses: as in :class:`vtorque_core.api.values.Extra`. A batch system refuses a
            job with an unknown name. One without countable resources ignores both.
    """

    cpus: int
    mib: int | None
    seconds: int = 0
    resources: Mapping[str, int] = field(default_factory=dict)
    licenses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Grant:
    """Amount of one resource that the batch system granted to a job on a node.

    Attributes:
        devices: indexes of the granted devices from 0, if the batch system assigns devices
            exclusively.
    """

    count: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobInfo:
    """One job in ``vmgr ps``, as the batch system reports it.

    Attributes:
        node: where the job runs, in the batch system's notation.
        nodes: the same nodes as a list, first node first.
        reason: why the job waits.
        known_as: the job id as users write it, if it differs from ``id``.
        ended: True if the job has ended and is still listed.
    """

    id: str
    name: str
    owner: str
    state: str
    node: str = ""
    seconds: float = 0.0
    reason: str = ""
    nodes: tuple[str, ...] = ()
    known_as: str = ""
    ended: bool = False
    exit_code: int | None = None


@dataclass(frozen=True)
class JobOnNode:
    """Phase and guests of a job on one node, or an error."""

    job_id: str
    node: str
    phase: str = ""
    guests: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Usage:
    """Resources that the guests of a job used on one node, from start to end.

    Attributes:
        cpu_seconds: user and system time of all QEMU processes (proc_pid_stat(5)).
        peak_mib: sum of the peak resident sizes (VmHWM of proc_pid_status(5)).
    """

    cpu_seconds: float
    peak_mib: int


class Submitter(Protocol):
    """Submits, lists and cancels jobs. Runs as the user, in ``vsub`` and ``vmgr``."""

    naming: str
    """The option for the job's name, which is the next word."""

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Split the command line by the rules of the site's own submit command.

        Raises:
            UsageError: an option is unknown; the message names it.
        """

    def submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> int:
        """Submit a job and print the batch system's output unchanged.

        Args:
            args: the user's command line.
            blob: the request to attach; None for a bare-metal job.
            needs: resources to request, consistent with ``args``; None for a bare-metal job.

        Returns:
            The exit status of the submit command.
        """

    def jobs(self) -> Iterable[JobInfo]:
        """Return the jobs that the user may see."""

    def cancel(self, job_id: str) -> int:
        """Cancel a job as the user, and return the exit status."""


@dataclass(frozen=True)
class BareNode:
    """A node without guests that is part of a mixed request.

    Attributes:
        name: the node's name in the batch system.
        slots: number of the job's processes on the node.
        part: index of the node's part of the request, from 1. Part 0 has the guests.
        address: IPv4 address as known on the guests' node; empty: unknown or not looked up.
    """

    name: str
    slots: int
    address: str = ""
    part: int = 1


@dataclass(frozen=True)
class BatchJob:
    """A job, as the batch system describes it to a root hook.

    Attributes:
        blob: the request; None if this is not a VM job.
        attempt: the number of restarts of the same id.
        owner: login name, which the batch system has authenticated.
        node: this node's name in the batch system.
        nodes: all nodes with guests, in rank order.
        bare: nodes without guests of a mixed request; their ranks follow those of ``nodes``.
        cpus: host CPU ids of the job on this node, if the batch system assigned them.
        cpu_count: number of CPUs of the job on this node, if known.
        cpu_counts: number of CPUs of the job on each of ``nodes``, if known.
        mem_mib: memory of the job on this node in MiB, if limited.
        resource_list: the resources as the batch system states them, for messages.
        bad_request: why the user's request cannot be read. The job is then refused.
        unknown: why the request, or the job's share of the node, is unknown: a host fault.
        detach: when the hook returns. Set it if the node's daemon or a scheduler waits for hooks.
        whole_node: True if the batch system runs no other job on this node at the same time
            (Slurm's --exclusive, OpenPBS's place=excl).
        whole_user: True if the batch system runs no job of another user on this node at the same
            time (Slurm's --exclusive=user).
        patience: seconds to wait for resources in use by other jobs. Then the outcome is IN_USE,
            and the job is requeued. None: half of ``[node] start_timeout``.
        queue, partition, account, qos: as the batch system reports them to root, for the site's
            ``[[limits]]``. Only those in ``BatchSystem.facts`` are set; empty: the job has none.
        known_as: the job id as users write it, if it differs from ``id`` (an element of a Slurm
            array).
        granted: other resources of the job on this node, by the names of ``Needs.resources``; None:
            the batch system counts no others.
    """

    id: str
    owner: str
    node: str
    nodes: tuple[str, ...]
    blob: bytes | None
    attempt: int = 0
    cpus: tuple[int, ...] = ()
    cpu_count: int | None = None
    cpu_counts: tuple[int, ...] = ()
    mem_mib: int | None = None
    name: str = ""
    resource_list: Mapping[str, str] = field(default_factory=dict)
    bad_request: str = ""
    unknown: str = ""
    detach: Detach = Detach.NEVER
    whole_node: bool = False
    whole_user: bool = False
    patience: float | None = None
    queue: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    known_as: str = ""
    granted: Mapping[str, Grant] | None = None
    bare: tuple[BareNode, ...] = ()

    @property
    def node_index(self) -> int:
        """Index of this node in ``nodes``."""
        return self.nodes.index(self.node)


@dataclass(frozen=True)
class PeerGuest:
    """One guest of the job, on any node. ``mib`` is RAM per guest, as on this node."""

    hostname: str
    slots: int
    mib: int = 0


class NodeAdapter(Protocol):
    """Connects vTorque to a batch system on a node. Runs as root in hooks and in the reaper.

    A subclass inherits methods that do nothing for all methods from :meth:`setup_steps` on.
    """

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read the job from the hook's arguments.

        If the job can still be informed, report an unreadable request as ``bad_request``, and an
        unreachable server as ``unknown``.

        Raises:
            HostFault: the arguments are not from this batch system.
        """

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Return context items that list the job's guests inside each guest: node file, node list.

        ``guests`` are those of all nodes, in rank order.
        """

    def finish(self, job: BatchJob, outcome: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Report the result of the start to the batch system, and return the hook's exit status.

        No lock is held, so the call may block until the server has ended the job.

        Args:
            job: the job.
            outcome: the result.
            reason: one line for the user.
            hook_waits: False if the hook has already returned, or if its exit status is ignored.
                The adapter must then ask the server to requeue a failed job. Return 0 if the server
                refuses, so that the job shell reports the failure. Return another number if the job
                is requeued.
        """

    def alive(self, ids: Sequence[str]) -> Mapping[str, Life]:
        """Return the state of each job. Never raises; an unanswered question gives UNKNOWN."""

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return the steps, in order, after which the batch system calls vTorque on this node."""
        return ()

    def mark(self, healthy: bool, reason: str) -> None:
        """Set or clear the node property that VM jobs request, for ``vtorque doctor --mark``.

        Idempotent. Changes only vTorque's own property and note, never the state of the node, so
        that bare-metal jobs still run.

        Args:
            healthy: True to set the property, False to clear it.
            reason: one printable line that says what is wrong; empty if healthy.

        Raises:
            HostFault: the server refuses the change; the message says what to do.
        """
        return

    def account(self, job_id: str, usage: Usage) -> None:
        """Record the guests' resource usage in the batch system's accounting, if it has a field.

        Called by the epilogue after the release, on several nodes of a job concurrently.

        Raises:
            HostFault: recording failed. The error is only logged.
        """
        return

    def start_again(self, job: JobAttempt, reason: str) -> None:
        """Requeue a job whose start was killed after the hook had returned.

        Called by the epilogue after the release, if the job shell ended with exit status 122. Limit
        the number of starts as in :meth:`finish`. Not needed if the hooks always wait.

        Raises:
            HostFault: the job was not requeued. The error is only logged.
        """
        return


@runtime_checkable
class DrainingAdapter(Protocol):
    """A node adapter whose batch system can drain a node and requeue a running job. As root.

    Both methods raise HostFault if the batch system does not answer, Refused if it refuses.
    """

    def drain(self, reason: str) -> None:
        """Drain this node: no new jobs until an admin resumes it; running jobs continue.

        Idempotent. ``reason`` is one printable line.
        """

    def requeue(self, job_id: str) -> None:
        """End a job that runs on this node, and requeue it under its id."""


@runtime_checkable
class MovingAdapter(Protocol):
    """A node adapter whose batch system allows a job's guest to run on a node outside the job.

    The job never gets that node. Instead, a job of root holds the resources there until the guest
    has left. As root. All methods are idempotent, and raise HostFault if the batch system does not
    answer.
    """

    def receive(self, job_id: str, nodes: Sequence[str], left: str, node: str) -> BatchJob:
        """Reserve on this node (``node``) the same resources that the job has on the node ``left``.

        ``nodes`` are the job's nodes after the migration, in rank order. Returns the job on this
        node. Raises Refused if the reservation is impossible.
        """

    def let_go(self, job_id: str, node: str) -> None:
        """Release the reservation for the job on ``node``."""

    def holds(self, job_id: str, node: str) -> bool:
        """Return True if the reservation of :meth:`receive` still exists.

        Anybody may have ended it.
        """

    def leave(self, job_id: str, node: str) -> None:
        """Release the node from the job after its guest has left.

        Does nothing if already released.
        """

    def over(self, job_id: str, attempt: int) -> bool:
        """Return True if this attempt of a job has ended or is ending."""


@dataclass(frozen=True)
class Started:
    """How the batch system started the job shell on the job's first node.

    Attributes:
        job_id: the id that the root hooks were called with.
        script: path of the script on this node; None: an interactive job.
        args: the script's arguments.
        cwd: the job's working directory; empty: the current directory.
        command: command of an interactive job; empty: a shell.
    """

    job_id: str
    script: Path | None
    args: tuple[str, ...] = ()
    cwd: str = ""
    command: str = ""


class JobShell(Protocol):
    """Describes the job to the job shell.

    Runs as the user, in the process that the batch system starts.
    """

    host_only: frozenset[str]
    """Variables of the batch system that are useless in a guest."""
    login: bool
    """True if scripts run in a login shell, which reads the user's profile."""
    dies_of_term: bool = False
    """True if, after SIGTERM, the job shell kills itself with SIGTERM once the script has ended.

    A bare-metal job's shell dies of SIGTERM at once. False: exit with the script's status."""

    def inside(self, environ: Mapping[str, str], guests: Mapping[str, str]) -> Mapping[str, str]:
        """Return environment variables that must differ inside the guests.

        ``environ`` is the script's environment on the host. ``guests`` are the variables that
        context items set in the guests.
        """
        return {}

    def started(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
    ) -> Started:
        """Return how the batch system started this job.

        Raises:
            UsageError: the batch system did not start this process.
        """

    def content(self, script: bytes) -> bytes:
        """Return the user's script from the batch system's copy."""

    def on_every_node(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return a command that runs ``command`` once on each of the job's nodes, as the user.

        The exit status of the returned command is nonzero if ``command`` fails on any node.

        Args:
            command: the command to run.
            environ: the job shell's environment.
            nodes: run on these nodes only; empty: on all, including nodes without guests.
        """
