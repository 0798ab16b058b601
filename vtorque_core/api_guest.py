"""What a guest type implements: how its guests are built, awaited, and run a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vtorque_core.api_context import ContextItem
from vtorque_core.api_domain import Element
from vtorque_core.api_node import GuestPlan, Resource, Site


@dataclass(frozen=True)
class ReadyGuest:
    """A guest that root has proven ready, as the wrapper reads it from the proof file."""

    name: str
    hostname: str
    rank: int
    run_dir: Path


@dataclass(frozen=True)
class Script:
    """The job script and how the batch system would have started it, all as the user's data.

    Args:
        name: its base name as the batch system has it.
        content: its bytes.
        interpreter: the ``-S`` shell, or None: the script's own ``#!`` line, else the login shell.
        args: the script's arguments.
        environ: the exact environment of the script.
        cwd: working directory inside the guest.
        umask: file mode creation mask.
        limits: RLIMIT name (``"NOFILE"``) to (soft, hard); -1 is unlimited.
        merge: stdout and stderr are one stream (``-j oe``).
        grace: seconds between TERM and KILL when the job is ended from outside.
        prologue, epilogue: the user's ``vm_prologue``/``vm_epilogue``; a failing one fails the job.
    """

    name: str
    content: bytes
    environ: Mapping[str, str]
    cwd: str
    interpreter: str | None = None
    args: Sequence[str] = ()
    umask: int = 0o077
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    merge: bool = False
    grace: float = 10.0
    prologue: bytes | None = None
    epilogue: bytes | None = None
    interactive: bool = False


@dataclass(frozen=True)
class Streams:
    """The wrapper's file descriptors. ``terminal``: stdin is a tty and becomes one inside."""

    stdin: int | None
    stdout: int
    stderr: int
    terminal: bool = False


class GuestDied(Exception):
    """The guest ended, or its stream broke, while something ran in it."""


class GuestDriver(Protocol):
    """One per guest type, made by ``GuestType.driver()``; stateless."""

    def elements(self, guest: GuestPlan, site: Site) -> Iterable[Element]:
        """Return the virtual hardware this kind of guest needs. Pure; root on the node.

        The core brings the job's overlay disk (if the image has a disk), NICs, rng, console.
        """
        ...

    def context(self, guest: GuestPlan, site: Site) -> Iterable[ContextItem]:
        """Return the guest type's own context items (mounts of its shares, ...). Pure."""
        ...

    def resources(
        self, guest: GuestPlan, items: Sequence[ContextItem], site: Site
    ) -> Iterable[Resource]:
        """Return what must exist before the domain starts, e.g. the seed. The core acquires it."""
        ...

    def await_ready(self, guest: GuestPlan, deadline: float, step: Callable[[str], None]) -> None:
        """Wait, as root, until the guest proves that its context is applied.

        ``deadline`` is in ``time.monotonic()`` seconds; ``step`` is told each stage seen.
        Raises HostFault naming the stage and reason; Refused if the user's own part failed.
        """
        ...

    def run(self, guest: ReadyGuest, script: Script, streams: Streams) -> int:
        """Run the script inside, in the job wrapper, as the job's user on the host.

        Forwards SIGTERM, SIGINT, SIGHUP, SIGUSR1/2, SIGCONT and SIGTSTP; returns the exit code
        (128+n for a signal). Raises GuestDied.
        """
        ...
