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
    from vtorque_core.api.kept_records import Usage
    from vtorque_core.api.setup_steps import Installation, SetupStep


class Outcome(enum.Enum):
    """Result of a prologue.

    Attributes:
        HOST_FAULT: the node is faulty. Requeue the job, or hold it after several failed starts.
            Keep VM jobs off the node.
        NOT_HERE: the start failed, but the node may be healthy. Like HOST_FAULT, but let the node
            run VM jobs.
        IN_USE: other jobs use the resources. Requeue the job; never hold it.
        NOT_OURS: vTorque starts no guests for this job.
    """

    READY = "ready"
    REFUSED = "refused"
    HOST_FAULT = "host_fault"
    NOT_HERE = "not_here"
    IN_USE = "in_use"
    NOT_OURS = "not_ours"

    @property
    def may_run_elsewhere(self) -> bool:
        """True if the job may be requeued, to start on this or another node."""
        return self in (Outcome.HOST_FAULT, Outcome.NOT_HERE, Outcome.IN_USE)


class JobState(enum.Enum):
    """State of a job in the batch system. UNKNOWN: the batch system does not answer."""

    ALIVE = "alive"
    SUSPENDED = "suspended"
    GONE = "gone"
    UNKNOWN = "unknown"


class Detach(enum.Enum):
    """The moment at which the prologue returns to the batch system.

    If the guests are not ready by then, a detached process completes the start.
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
        vm: values of ``-vm`` on the command line.
        rest: arguments for the batch system.
        script: path; None: standard input, or an interactive job.
        content: the script's text.
        vcpus_given, mib_given: requested CPUs and MiB per node.
        directives: values of ``-vm`` in the script's directives.
        facts: requested ``queue``, ``partition``, ``account`` and ``qos``.
        resources_given: other requested resources, named as in :class:`Needs`.
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
    """Resources per node that ``vsub`` requests unless the user has requested them.

    Attributes:
        cpus, mib: total for guests, QEMU, plugins and ``[node] host_reserve_*``. ``mib`` None:
            request no memory.
        seconds: added to the walltime for the start of the guests.
        resources, licenses: see :class:`vtorque_core.api.values.Extra`. The submitter refuses
            unknown names.
    """

    cpus: int
    mib: int | None
    seconds: int = 0
    resources: Mapping[str, int] = field(default_factory=dict)
    licenses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Grant:
    """Amount of one resource that the batch system granted to a job on a node.

    ``devices``: indexes, from 0, of exclusively assigned devices.
    """

    count: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobInfo:
    """One job in ``vmgr ps``.

    Attributes:
        node: the job's nodes, as the batch system prints them.
        nodes: the nodes' names, in rank order; empty if the job does not run.
        seconds: run time.
        known_as: see :class:`BatchJob`.
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
    """Phase, guests and image of a job on one node, or an error."""

    job_id: str
    node: str
    phase: str = ""
    guests: tuple[str, ...] = ()
    error: str = ""
    image: str = ""


class Submitter(Protocol):
    """A batch system's commands to submit, list and cancel jobs. Runs as the user."""

    naming: str
    """The command-line option whose value is the job's name."""

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Split the command line as the site's own submit command does.

        Raises UsageError with the name of an unknown option.
        """

    def submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> int:
        """Submit a job, print the batch system's output unchanged, and return the exit status.

        ``blob`` is the encoded job request. For a bare-metal job, ``blob`` and ``needs`` are None.
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
        part: the node's component of a heterogeneous job, from 1. Component 0 has the guests.
        address: the node's IPv4 address; empty if unknown.
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
        node: this node.
        nodes: all nodes with guests, in rank order.
        blob: the encoded request; None: vTorque starts no guests for this job.
        attempt: number of restarts of the job.
        cpus: ids of the job's CPUs on this node, if assigned.
        cpu_count: number of the job's CPUs on this node, if known.
        cpu_counts: number of the job's CPUs on each of ``nodes``, if known.
        mem_mib: the job's memory on this node, if limited.
        resource_list: the requested resources, for messages.
        bad_request: why the request is unreadable. The job is then refused.
        unknown: why the request or the allocation is unknown. This is a host fault.
        whole_node: the batch system runs no other job on this node.
        whole_user: the batch system runs no other user's job on this node.
        patience: seconds to wait for resources in use by other jobs; None: half of ``[node]
            start_timeout``.
        queue, partition, account, qos: set only if named in ``BatchSystem.facts``.
        known_as: the job id that users write, if it differs from ``id``.
        granted: other resources on this node, named as in :class:`Needs`; None: unknown.
        bare: nodes without guests in a mixed request. Their ranks follow those of ``nodes``.
        placed: descriptor of an eventfd(2), or None. vTorque adds 1 when the guests boot, but for
            warm guests when it has leased the job's resources, and for guests that boot on order
            (:class:`LateDriver`) when the order is possible. From then on, the job shell may start.
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
    placed: int | None = None

    @property
    def node_index(self) -> int:
        """Index of this node in ``nodes``."""
        return self.nodes.index(self.node)


@dataclass(frozen=True)
class PeerGuest:
    """One guest of the job, on any node. ``mib`` is its RAM."""

    hostname: str
    slots: int
    mib: int = 0


class NodeAdapter(Protocol):
    """A batch system's interface on a node. Runs as root, in hooks and in the reaper.

    :meth:`setup_steps` and the methods below it are optional. By default they do nothing.
    """

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read the job from the arguments of the batch system's hook.

        Set ``bad_request`` if the request is unreadable, ``unknown`` if the server is unreachable.
        Raises HostFault for arguments of another batch system.
        """

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Return the batch system's context items for each guest, such as a node file.

        ``guests`` are the guests of all nodes, in rank order.
        """

    def finish(self, job: BatchJob, outcome: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Report the result of the start to the batch system, and return the hook's exit status.

        After exit status 0, the batch system starts the job shell, which reports any failure.
        The call may block. ``reason`` is one line for the user.

        If ``hook_waits`` is False, the hook has already returned 0 to the batch system. Then ask
        the server to requeue a failed job, and return nonzero only if the server agrees.
        """

    def job_states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Return the state of each job. Never raises."""

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return the steps, in order, that make the batch system call vTorque on this node."""
        return ()

    def mark(self, healthy: bool, reason: str) -> None:
        """Set or clear the node property that VM jobs request, for ``vtorque doctor --mark``.

        Idempotent. Bare-metal jobs must still run on an unhealthy node. ``reason`` is one printable
        line; empty if healthy. Raises HostFault, with instructions, if the server refuses.
        """
        return

    def account(self, job_id: str, usage: Usage) -> None:
        """Record the guests' usage in the batch system's accounting, if possible.

        Called by each node's epilogue, after the release of resources. HostFault is only logged.
        """
        return

    def start_again(self, job: JobAttempt, reason: str) -> None:
        """Requeue a job whose detached start (:class:`Detach`) was killed.

        Called by the epilogue, after the release of resources. The adapter must limit the number
        of starts of a job. HostFault is only logged.
        """
        return


@runtime_checkable
class DrainingAdapter(Protocol):
    """A node adapter that can drain a node and requeue a running job. As root.

    Both methods raise HostFault if the batch system does not answer, and Refused if the
    batch system refuses.
    """

    def drain(self, reason: str) -> None:
        """Drain this node until an admin resumes it. Running jobs continue.

        Idempotent. ``reason`` is one printable line.
        """

    def requeue(self, job_id: str) -> None:
        """End a job that runs on this node, and requeue it."""


@runtime_checkable
class MigrationAdapter(Protocol):
    """A node adapter that can reserve resources outside the job for a migrating guest. As root.

    The reservation is a separate job that root submits. All methods are idempotent, and raise
    HostFault if the batch system does not answer.
    """

    def reserve_node(self, job_id: str, nodes: Sequence[str], left: str, node: str) -> BatchJob:
        """Reserve as many resources on the destination as the job has on the source node.

        ``node`` is the destination, which is this node; ``left`` is the source node.
        ``nodes`` are the job's nodes after the migration, in rank order. Returns the job with its
        CPUs and memory on this node. Raises Refused if the job cannot get them.
        """

    def release_node(self, job_id: str, node: str) -> None:
        """Release the reservation for the job on ``node``."""

    def is_reserved(self, job_id: str, node: str) -> bool:
        """Return True if the reservation still exists. An admin can cancel it."""

    def remove_node(self, job_id: str, node: str) -> None:
        """Remove ``node`` from the job after the job's guests have left ``node``."""

    def has_ended(self, job_id: str, attempt: int) -> bool:
        """Return True if this attempt of a job has ended or is ending."""


@dataclass(frozen=True)
class ShellStart:
    """How the batch system started the job shell.

    Attributes:
        script: path on this node; None: run ``command`` with the job shell's standard input, which
            may be a terminal.
        command: shell commands; empty: an interactive shell.
    """

    job_id: str
    script: Path | None
    args: tuple[str, ...] = ()
    cwd: str = ""
    command: str = ""


class JobShell(Protocol):
    """A batch system's part of the job shell. Runs as the job's owner."""

    host_only: frozenset[str]
    """Variables of the batch system that are useless in a guest."""
    login: bool
    """True if scripts run in a login shell."""
    dies_of_term: bool = False
    """True if a job shell that got SIGTERM ends by this signal, not with the script's status."""

    def guest_env(self, environ: Mapping[str, str], guests: Mapping[str, str]) -> Mapping[str, str]:
        """Return new values for the script's variables that must differ in the guest.

        ``environ`` is the script's environment. ``guests`` has the variables of context items.
        """
        return {}

    def read_start(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
    ) -> ShellStart:
        """Return how the batch system started this job shell.

        Raises UsageError if this process was not started by the batch system.
        """

    def content(self, script: bytes) -> bytes:
        """Return the batch system's copy of the script without lines that ``submit`` inserted."""

    def node_command(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return a command line that runs ``command`` on each of the job's nodes, as the user.

        The command line must fail if ``command`` fails on any node. If ``nodes`` is not empty, run
        ``command`` only on these nodes.
        """
