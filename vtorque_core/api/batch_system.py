"""What a batch system implements, in three parts.

The submitting part runs as the user in ``vsub`` and ``vmgr``, the node part as root in the batch
system's hooks, the job part as the user where the batch system starts the job.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from vtorque_core.base.errors import Refused
from vtorque_core.base.names import JobAttempt

if TYPE_CHECKING:
    from vtorque_core.api.guest_context import ContextItem
    from vtorque_core.api.setup_steps import Installation, SetupStep


class Outcome(enum.Enum):
    """How a prologue ended; the adapter tells its batch system in that system's way."""

    READY = "ready"
    REFUSED = "refused"
    HOST_FAULT = "host_fault"
    NOT_HERE = "not_here"
    """It failed on this node, which need not be at fault: a user can bring this about.
    As HOST_FAULT, but nothing may be taken from the node for it."""
    IN_USE = "in_use"
    """Another job has what it needs, still after the prologue has waited: it is to wait in the
    batch system, never to be held, and the node is not at fault."""
    NOT_OURS = "not_ours"

    @property
    def may_run_elsewhere(self) -> bool:
        """Whether another node, or this one later, may do what failed."""
        return self in (Outcome.HOST_FAULT, Outcome.NOT_HERE, Outcome.IN_USE)


class Life(enum.Enum):
    """What the batch system knows of a job; the reaper waits on UNKNOWN.

    SUSPENDED: alive, and the batch system has stopped its processes.
    """

    ALIVE = "alive"
    SUSPENDED = "suspended"
    GONE = "gone"
    UNKNOWN = "unknown"


class Detach(enum.Enum):
    """The moment at which the start hook returns to the batch system.

    If that is before the guests are ready, a detached process continues the start, and the job
    shell waits.
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
    """The user's command line, split.

    Args:
        vm: every ``-vm`` value, in order.
        rest: the arguments left for the batch system, in the user's order.
        script: the script's path, or None (stdin or interactive).
        content: the script's bytes where the submitter had to read them (stdin).
        shell: the user's own ``-S`` if any.
        interactive: a terminal job.
        vcpus_given, mib_given: what the arguments ask of the batch system per node, if they do.
        directives: the option lines found in the script that concern vTorque (``#VSUB -vm``).
        facts: what the user says of the job's queue, partition, account, qos, by these names.
        resources_given: what the arguments ask for of what else the batch system counts: per node,
            and licences of the job; by the names that :class:`Needs` has.
        nodes_given: how many nodes they ask for at least, if they do.
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
    """What a VM job asks of the batch system on each node, where its user has not said.

    Args:
        cpus: the guests' virtual CPUs, what plugins add and what the site reserves for the host.
        mib: the guests' RAM, QEMU's overhead, what plugins add and the host's reserve, in MiB;
            None: whatever the batch system gives a job that asks for so many CPUs.
        seconds: added to the walltime for the guests' start; 0: nothing.
        resources, licenses: as plugins name them (:class:`vtorque_core.api.values.Extra`); a batch
            system that has none of a name refuses the job, one that has none at all ignores them.
    """

    cpus: int
    mib: int | None
    seconds: int = 0
    resources: Mapping[str, int] = field(default_factory=dict)
    licenses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Grant:
    """How much of a resource a job has on a node.

    ``devices``: which ones, as the batch system counts them from 0, if it says so; no other job
    has them.
    """

    count: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobInfo:
    """One line of ``vmgr ps``, from the batch system.

    ``node``: where it runs, as the batch system shows it; ``nodes``: the same one by one, the
    job's first one first. ``reason``: why it waits. ``known_as``: what users say for ``id``.
    ``ended``: true if the batch system still lists the job but has ended it.
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
    """What one of a job's nodes says of it: its phase and its guests' names, or an error."""

    job_id: str
    node: str
    phase: str = ""
    guests: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Usage:
    """What the guests of a job used on one node: their QEMU processes, from start to end.

    Args:
        cpu_seconds: user and system time of all of them (proc_pid_stat(5)).
        peak_mib: the sum of their greatest resident sizes (VmHWM of proc_pid_status(5)).
    """

    cpu_seconds: float
    peak_mib: int


class Submitter(Protocol):
    """The submitting half. Runs as the user, in ``vsub`` and ``vmgr``."""

    naming: str
    """The option that names a job; the name is the next word."""

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Split the user's command line as the site's own submit command would read it.

        Raises UsageError naming the option that it does not know.
        """

    def submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> int:
        """Submit with the request ``blob`` attached; return the exit code.

        ``needs`` fit what the user has given (``args.vcpus_given``, ``args.mib_given``): vsub has
        looked. Both are None for a bare-metal job. What the batch system prints is the user's to
        see, unchanged.
        """

    def jobs(self) -> Iterable[JobInfo]:
        """Return the jobs the user may see."""

    def cancel(self, job_id: str) -> int:
        """Cancel as the user; return the exit code."""


@dataclass(frozen=True)
class BareNode:
    """A node of the bare-metal part of a mixed request.

    Args:
        name: in the batch system.
        slots: how many processes of the job go there.
        part: of which part of the request, in its order; the guests are part 0.
        address: IPv4, as the guests' node knows it; empty: it knows none, or it is not looked up.
    """

    name: str
    slots: int
    address: str = ""
    part: int = 1


@dataclass(frozen=True)
class BatchJob:
    """A job, as the batch system describes it to a root hook.

    Args:
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
        whole_node: true if the batch system runs no other job on this node during this job (Slurm's
            --exclusive, OpenPBS's place=excl).
        whole_user: true if the batch system runs no job of another user on this node during this
            job (Slurm's --exclusive=user).
        patience: seconds to wait for resources in use by other jobs. Then the outcome is IN_USE,
            and the job is requeued. None: half of ``[node] start_timeout``.
        queue, partition, account, qos: as the batch system reports them to root, for the site's
            ``[[limits]]``. Only those that ``BatchSystem.facts`` names are set; empty: the job has
            none.
        known_as: the job's id for users if it is not ``id`` (an element of a Slurm array).
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
        """This node's place in ``nodes``."""
        return self.nodes.index(self.node)


@dataclass(frozen=True)
class PeerGuest:
    """One guest of the job, on whichever node: its name, its vCPUs, MiB of RAM (as this node's)."""

    hostname: str
    slots: int
    mib: int = 0


class NodeAdapter(Protocol):
    """The node part. Runs as root in the batch system's hooks, and in the reaper.

    A class that names this as its base has the last six methods: the first four then do nothing,
    the others refuse.
    """

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read the hook's arguments. Raises HostFault if they are not this batch system's.

        A request that cannot be read is no error here: it is the job's ``bad_request``. Nor is a
        server that does not answer, if the job can be told of: that is its ``unknown``.
        """

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Return what says inside every guest which guests the job has: node file, node list.

        ``guests`` are those of all nodes, in rank order.
        """

    def finish(self, job: BatchJob, outcome: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Report to the batch system how the start ended; return the hook's exit code.

        ``hook_waits`` is false if the hook has returned already, or its exit code is ignored. The
        adapter must then ask the batch system's server to requeue a failed job. Return 0 if the
        server refuses: the job shell then reports the failure. Return another number if the job is
        requeued. That call may block until the server has ended the job: no lock is held.
        """

    def alive(self, ids: Sequence[str]) -> Mapping[str, Life]:
        """Ask which jobs still exist. Never raises: what cannot be known is UNKNOWN."""

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return what makes the batch system call vTorque on this node, in order."""
        return ()

    def mark(self, healthy: bool, reason: str) -> None:
        """Set (or clear, if not ``healthy``) on this node the property that VM jobs ask for.

        For ``vtorque doctor --mark``; no change if it is so already. Only vTorque's own property
        or feature is touched, and a note of vTorque's, never the node's state: bare-metal jobs run
        on. ``reason``: one printable line of what is wrong; empty if healthy. Raises HostFault,
        with what to do, if the batch system's server cannot be told.
        """
        return

    def account(self, job_id: str, usage: Usage) -> None:
        """Note what the guests of this node used where the batch system's accounting shows it.

        Called by the epilogue once all is released; nothing where accounting has no place for it.
        Several nodes of a job may call it at the same time. Raises HostFault: it is only told.
        """
        return

    def start_again(self, job: JobAttempt, reason: str) -> None:
        """Requeue a job whose start was killed after its hook had returned.

        The epilogue calls this after the release, if the job shell has ended with exit status 122.
        Not needed if the hook always waits: the batch system then sees that it was killed. Limit
        the number of starts as :meth:`finish` does. Raises HostFault: it is only told.
        """
        return

    def drain(self, reason: str) -> None:
        """Have no new job come to this node until an admin says otherwise; what is there runs on.

        Any number of times. ``reason``: a printable line. Raises HostFault if the batch system
        cannot be told, Refused if it has no such thing.
        """
        raise Refused("this site's batch system knows no node that gets no more jobs")

    def requeue(self, job_id: str) -> None:
        """Have a job that runs here end, and start again under its id. Raises as :meth:`drain`."""
        raise Refused("this site's batch system starts no job again")


@runtime_checkable
class MovingAdapter(Protocol):
    """A node part whose batch system can have a job's guest be on a node that is not the job's.

    The job is never given that node: a job of root's holds its share there until the guest is gone.
    As root; each may be called twice. All raise HostFault: the batch system does not answer.
    """

    def receive(self, job_id: str, nodes: Sequence[str], left: str, node: str) -> BatchJob:
        """Hold on ``node``, this one, what the job has on the node ``left``; return the job here.

        ``nodes``: where its guests are then, in rank order. Raises Refused: that cannot be had.
        """

    def let_go(self, job_id: str, node: str) -> None:
        """Hold nothing on ``node`` for the job any more."""

    def holds(self, job_id: str, node: str) -> bool:
        """Return whether what :meth:`receive` holds there still is: anybody may have ended it."""

    def leave(self, job_id: str, node: str) -> None:
        """Give the node back, if it is still one of the job's: its guest has left."""

    def over(self, job_id: str, attempt: int) -> bool:
        """Return whether this attempt of a job has ended, or ends."""


@dataclass(frozen=True)
class Started:
    """How the batch system has started the job shell on the job's first node.

    Args:
        job_id: the id that the root hooks were called with.
        script: path of the script on this node; None: an interactive job.
        args: the script's arguments.
        cwd: the job's working directory; empty: this process's.
        command: what an interactive job runs on its terminal instead of a shell; empty: a shell.
    """

    job_id: str
    script: Path | None
    args: tuple[str, ...] = ()
    cwd: str = ""
    command: str = ""


class JobShell(Protocol):
    """The job part. Runs as the user, in the job shell that the batch system starts."""

    host_only: frozenset[str]
    """Variables of the batch system that make no sense in a guest."""
    login: bool
    """Whether scripts are commands of a login shell, which reads the user's profile before."""
    dies_of_term: bool = False
    """Whether TERM ends the job shell in the end, once the script has ended and all is written, as
    it ends a plain job's shell at once; else the job has the script's exit code."""

    def inside(self, environ: Mapping[str, str], guests: Mapping[str, str]) -> Mapping[str, str]:
        """Return variables of the script's that are to be otherwise, to agree with its guests.

        ``environ``: what it would have, from whoever; ``guests``: what root has put there. A class
        that names this as its base need not have it.
        """
        return {}

    def started(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
    ) -> Started:
        """Return what this job is. Raises UsageError if the batch system has not started us."""

    def content(self, script: bytes) -> bytes:
        """Return the user's script from what the batch system has kept of it."""

    def on_every_node(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return a command that runs ``command`` once on each of the job's nodes, as the user.

        It ends with an exit code other than 0 if one of them does. ``nodes``: those with guests,
        where only these are to run it; of a mixed request there may be others.
        """
