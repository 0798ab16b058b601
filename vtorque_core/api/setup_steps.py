"""Interface of the steps of ``vtorque setup``. Implementations are in ``vtorque_admin.steps``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from vtorque_core.base import safefs as safefs

make_directories = safefs.make_directories
rewrite_file = safefs.rewrite


@dataclass(frozen=True)
class Installation:
    """Programs and time limits of this installation of vTorque, for steps that install hooks.

    Attributes:
        program: path of ``vtorque``.
        jobshell: the program that the batch system starts as the job's shell.
        start_time: maximum seconds for a start, including the release after a failure.
        end_time: maximum seconds for the release of a job's guests.
        python: the interpreter of ``program``; None: hooks call ``program`` itself.
        grace: seconds from SIGTERM to SIGKILL of a job's script.
    """

    program: Path
    config: Path
    jobshell: Path
    start_time: float = 360.0
    end_time: float = 60.0
    python: Path | None = None
    grace: float = 10.0

    @property
    def command(self) -> tuple[str, ...]:
        """The command that root's hooks execute, without the subcommand."""
        if self.python is None:
            return (str(self.program),)
        return (str(self.python), "-I", "-m", "vtorque_core.cli.vtorque")

    def call(self, command: str, *words: str) -> tuple[str, ...]:
        """Return the command line of a ``vtorque`` command such as ``reap``."""
        return (*self.command, command, "--config", str(self.config), *words)

    def hook(self, *words: str) -> tuple[str, ...]:
        """Return the command line of ``vtorque hook``, such as ``vtorque hook prologue``."""
        return self.call("hook", *words)


@runtime_checkable
class SetupStep(Protocol):
    """One change of the node. Every method runs as root, at any time, and may raise HostFault."""

    @property
    def text(self) -> str:
        """Description of the change: ``write /etc/slurm/prolog.d/50-vtorque``."""

    def is_applied(self) -> bool:
        """Return True if the step is already applied."""

    def apply(self) -> None:
        """Apply the step."""

    def undo(self) -> None:
        """Restore the state before :meth:`apply`. Do nothing if the step is not applied."""
