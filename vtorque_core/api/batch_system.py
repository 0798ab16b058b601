"""Interface of a batch system: Submitter, NodeAdapter and JobShell."""

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
    """Result of a prologue.

    Attributes:
        NOT_HERE: the start failed on this node, perhaps because of the user. Treat it like
            HOST_FAULT, but do not drain the node.
        IN_USE: other jobs still hold the resources after the prologue has waited. Requeue the job;
            do not hold it or blame the node.
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
        SUSPENDED: the batch system has stopped the job's processes.
        UNKNOWN: the batch system does not answer. The reaper waits.
    """

    ALIVE = "alive"
    SUSPENDED = "suspended"
    GONE = "gone"
    UNKNOWN = "unknown"


class Detach(enum.Enum):
    """When the start hook returns to the batch system.

    A detached process then continues an unfinished start, and the job shell waits.
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
        rest: arguments for the batch system, in order.
        script: path of the script; None: standard input, or an interactive job.
        content: the script, if read from standard input.
        shell: value of ``-S``.
        vcpus_given, mib_given: requested CPUs and MiB per node.
        directives: the script's ``#VSUB -vm`` lines.
        facts: requested ``queue``, ``partition``, ``account`` and ``qos``.
        resources_given: other requested resources, named and counted as in :class:`Needs`.
        nodes_given: requested minimum number of nodes.
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
    """Resources per node that ``vsub`` requests for a VM job unless the user has requested them.

    Attributes:
        cpus: for guests, plugins and the site's host reserve.
        mib: MiB for guests, QEMU, plugins and host reserve; None: the batch system's default for
            this number of CPUs.
        seconds: added to the walltime for the start of the guests.
        resources, licenses: as in :class:`vtorque_core.api.values.Extra`. A batch system refuses
            unknown names, or ignores both if it has no countable resources.
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
        devices: indexes, from 0, of devices that are assigned exclusively.
    """

    count: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobInfo:
    """One job in ``vmgr ps``.

    Attributes:
        node: the job's nodes in the batch system's notation.
        nodes: the job's nodes as a list, first node first.
        reason: why the job waits.
        known_as: the job id that users write, if it differs from ``id``.
        ended: the job has ended and is still listed.
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
    """Resources that a job's guests used on one node.

    Attributes:
        cpu_seconds: user and system time of all QEMU processes (proc_pid_stat(5)).
        peak_mib: sum of their peak resident sizes (VmHWM of proc_pid_status(5)).
    """

    cpu_seconds: float
    peak_mib: int


class Submitter(Protocol):
    """Submits, lists and cancels jobs, as the user, in ``vsub`` and ``vmgr``."""

    naming: str
    """The option for the job's name, which is the next word."""

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Split the command line by the rules of the site's own submit command.

        Raises:
            UsageError: an option is unknown; the message names it.
        """

    def submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> int:
        """Submit a job, print the batch system's output unchanged, and return the exit status.

        ``blob`` is the request to attach; request ``needs`` too, consistent with ``args``. Both are
        None for a bare-metal job.
        """

    def jobs(self) -> Iterable[JobInfo]:
        """Return the jobs that the user may see."""

    def cancel(self, job_id: str) -> int:
        """Cancel a job as the user, and return the exit status."""


@dataclass(frozen=True)
class BareNode:
    """A node without guests in a mixed request.

    Attributes:
        slots: number of the job's processes on the node.
        part: index of the node's part of the request, from 1. Part 0 has the guests.
        address: IPv4 address as known on the guests' node; empty if unknown.
    """

    name: str
    slots: int
    address: str = ""
    part: int = 1


@dataclass(frozen=True)
class BatchJob:
    """A job, as the batch system describes it to a root hook.

    Attributes:
        owner: login name, authenticated by the batch system.
        node: this node's name in the batch system.
        nodes: all nodes with guests, in rank order.
        blob: the request; None: not a VM job.
        attempt: number of restarts of this id.
        cpus: ids of the job's CPUs on this node, if assigned.
        cpu_count: number of the job's CPUs on this node, if known.
        cpu_counts: the same for each of ``nodes``.
        mem_mib: the job's memory on this node in MiB, if limited.
        resource_list: the job's resources in the batch system's words, for messages.
        bad_request: why the request cannot be read. The job is then refused.
        unknown: why the request or the job's share of the node is unknown. This is a host fault.
        detach: set it if the node's daemon or a scheduler waits for hooks.
        whole_node: no other job runs on this node at the same time (Slurm's --exclusive, OpenPBS's
            place=excl).
        whole_user: no other user's job runs on this node at the same time (Slurm's
            --exclusive=user).
        patience: seconds to wait for resources in use by other jobs, before the outcome is IN_USE.
            None: half of ``[node] start_timeout``.
        queue, partition, account, qos: for ``[[limits]]``. Set only those in ``BatchSystem.facts``.
        known_as: the job id that users write, if it differs from ``id`` (an element of a Slurm
            array).
        granted: the job's other resources on this node, by the names in ``Needs.resources``; None:
            the batch system counts no others.
        bare: nodes without guests in a mixed request. Their ranks follow those of ``nodes``.
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
    """One guest of the job, on any node. ``mib`` is RAM per guest on this node."""

    hostname: str
    slots: int
    mib: int = 0


class NodeAdapter(Protocol):
    """Connects vTorque to a batch system on a node. Runs as root in hooks and in the reaper.

    The methods from :meth:`setup_steps` on do nothing by default.
    """

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read the job from the hook's arguments.

        If the job can still be informed, set ``bad_request`` for an unreadable request, and
        ``unknown`` for an unreachable server.

        Raises:
            HostFault: the arguments are not from this batch system.
        """

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Return context items, such as a node file, that list the job's guests inside each guest.

        ``guests`` are those of all nodes, in rank order.
        """

    def finish(self, job: BatchJob, outcome: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Report the result of the start to the batch system, and return the hook's exit status.

        No lock is held, so the call may block until the server has ended the job. ``reason`` is one
        line for the user.

        If ``hook_waits`` is False, the batch system ignores the hook's exit status, or the hook has
        already returned. Then ask the server to requeue a failed job. Return 0 if the server
        refuses, so that the job shell reports the failure; otherwise return another number.
        """

    def alive(self, ids: Sequence[str]) -> Mapping[str, Life]:
        """Return the state of each job; UNKNOWN if the server does not answer. Never raises."""

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return the steps, in order, after which the batch system calls vTorque on this node."""
        return ()

    def mark(self, healthy: bool, reason: str) -> None:
        """Set or clear the node property that VM jobs request, for ``vtorque doctor --mark``.

        Idempotent. Change only this property and vTorque's own note, so that bare-metal jobs still
        run. ``reason`` is one printable line; empty if healthy.

        Raises:
            HostFault: the server refuses the change; the message says what to do.
        """
        return

    def account(self, job_id: str, usage: Usage) -> None:
        """Record the guests' usage in the batch system's accounting, if possible.

        Called by the epilogue after the release, on several nodes of a job concurrently.

        Raises:
            HostFault: recording failed. The error is only logged.
        """
        return

    def start_again(self, job: JobAttempt, reason: str) -> None:
        """Requeue a job whose start was killed after the hook had returned.

        Called by the epilogue after the release. Limit the number of starts as in :meth:`finish`.
        Not needed if the hooks always wait.

        Raises:
            HostFault: the job was not requeued. The error is only logged.
        """
        return


@runtime_checkable
class DrainingAdapter(Protocol):
    """A node adapter that can drain a node and requeue a running job. As root.

    Both methods raise HostFault if the batch system does not answer, Refused if it refuses.
    """

    def drain(self, reason: str) -> None:
        """Drain this node: no new jobs until an admin resumes it. Running jobs continue.

        Idempotent. ``reason`` is one printable line.
        """

    def requeue(self, job_id: str) -> None:
        """End a job that runs on this node, and requeue it under its id."""


@runtime_checkable
class MovingAdapter(Protocol):
    """A node adapter that lets a job's guest run on a node outside the job. As root.

    The job never gets that node. Instead, a job of root holds the resources there until the guest
    has left.

    All methods are idempotent, and raise HostFault if the batch system does not answer.
    """

    def receive(self, job_id: str, nodes: Sequence[str], left: str, node: str) -> BatchJob:
        """Reserve on this ``node`` the resources that the job has on the node ``left``.

        ``nodes`` are the job's nodes after the migration, in rank order. Return the job on this
        node.

        Raises:
            Refused: the reservation is impossible.
        """

    def let_go(self, job_id: str, node: str) -> None:
        """Release the reservation for the job on ``node``."""

    def holds(self, job_id: str, node: str) -> bool:
        """Return True if the reservation still exists. Anyone may have ended it."""

    def leave(self, job_id: str, node: str) -> None:
        """Remove the node from the job after its guest has left."""

    def over(self, job_id: str, attempt: int) -> bool:
        """Return True if this attempt of a job has ended or is ending."""


@dataclass(frozen=True)
class Started:
    """How the batch system started the job shell.

    Attributes:
        job_id: the id that the root hooks were called with.
        script: path of the script on this node; None: an interactive job.
        cwd: the job's working directory; empty: the current directory.
        command: command of an interactive job; empty: a shell.
    """

    job_id: str
    script: Path | None
    args: tuple[str, ...] = ()
    cwd: str = ""
    command: str = ""


class JobShell(Protocol):
    """Describes the job to the job shell. Runs as the user."""

    host_only: frozenset[str]
    """Variables of the batch system that are useless in a guest."""
    login: bool
    """True if scripts run in a login shell, which reads the user's profile."""
    dies_of_term: bool = False
    """True if, after SIGTERM, the job shell kills itself with SIGTERM once the script has ended.

    A bare-metal job's shell dies of SIGTERM at once. False: exit with the script's status."""

    def inside(self, environ: Mapping[str, str], guests: Mapping[str, str]) -> Mapping[str, str]:
        """Return environment variables that must differ inside the guests.

        ``environ`` is the script's environment on the host. ``guests`` are variables that context
        items set in the guests.
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
        """Return a command line that runs ``command`` on each of the job's nodes, as the user.

        Its exit status is nonzero if ``command`` fails on any node. ``nodes`` selects nodes; if
        empty, the command also runs on nodes without guests.
        """
