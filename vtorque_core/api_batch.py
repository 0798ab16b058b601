"""What a batch system implements: the submitting half (user) and the node half (root's hooks)."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class Outcome(enum.Enum):
    """How a prologue ended; the adapter tells its batch system in that system's way."""

    READY = "ready"
    REFUSED = "refused"
    HOST_FAULT = "host_fault"
    NOT_OURS = "not_ours"


class Life(enum.Enum):
    """What the batch system knows of a job; the reaper waits on UNKNOWN."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


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


@dataclass(frozen=True)
class JobInfo:
    """One line of ``vmgr ps``, from the batch system."""

    id: str
    name: str
    owner: str
    state: str
    node: str = ""
    seconds: float = 0.0


class Submitter(Protocol):
    """The submitting half. Runs as the user, in ``vsub`` and ``vmgr``."""

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Split the user's command line as the site's own submit command would read it.

        Raises UsageError naming the option that it does not know.
        """
        ...

    def submit(self, args: SubmitArgs, blob: bytes | None) -> int:
        """Submit with the request ``blob`` (None: bare metal) attached; return the exit code.

        What the batch system prints is the user's to see, unchanged.
        """
        ...

    def jobs(self) -> Iterable[JobInfo]:
        """Return the jobs the user may see."""
        ...

    def cancel(self, job_id: str) -> int:
        """Cancel as the user; return the exit code."""
        ...


@dataclass(frozen=True)
class BatchJob:
    """What a root hook learns of the job. ``blob`` is None when it is not a VM job.

    Args:
        attempt: counts restarts of the same id, from 0.
        owner: login name as the batch system has authenticated it.
        node: this node's name in the batch system; ``nodes``: all, rank order.
        cpus: host CPU ids of the job on this node, if the batch system fixed them.
        cpu_count: how many CPUs of this node the job has, if known.
        mem_mib: memory of the job on this node in MiB, if limited.
        resource_list: the resources as the batch system states them, for messages.
        bad_request: why the user's request cannot be read at all; the job is then refused.
    """

    id: str
    owner: str
    node: str
    nodes: tuple[str, ...]
    blob: bytes | None
    attempt: int = 0
    cpus: tuple[int, ...] = ()
    cpu_count: int | None = None
    mem_mib: int | None = None
    name: str = ""
    resource_list: Mapping[str, str] = field(default_factory=dict)
    bad_request: str = ""

    @property
    def node_index(self) -> int:
        """This node's place in ``nodes``."""
        return self.nodes.index(self.node)


@dataclass(frozen=True)
class HookFile:
    """A file that ``vtorque setup install`` puts in place for this batch system."""

    path: Path
    content: str
    mode: int = 0o755


class NodeAdapter(Protocol):
    """The node half. Runs as root in the batch system's hooks, and in the reaper."""

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read the hook's arguments. Raises HostFault if they are not this batch system's.

        A request that cannot be read is no error here: it is the job's ``bad_request``.
        """
        ...

    def finish(self, outcome: Outcome, reason: str) -> int:
        """Tell the batch system how the prologue ended; return the hook's exit code."""
        ...

    def alive(self, ids: Sequence[str]) -> Mapping[str, Life]:
        """Ask which jobs still exist. Never raises: what cannot be known is UNKNOWN."""
        ...

    def hook_files(self) -> Iterable[HookFile]:
        """Return what ``vtorque setup install`` writes; empty if nothing is needed."""
        ...
