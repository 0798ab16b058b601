"""Interface of the harness that authors of a batch adapter write for the contract.

A harness simulates the batch system around the real adapter. A simulated submit command records its
input, and :meth:`BatchHarness.start` returns what the real system would start on the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from vtorque_core.api.batch_system import BatchJob, NodeAdapter, Outcome
from vtorque_core.api.node_job import Site
from vtorque_core.api.strategies import BatchSystem
from vtorque_core.api.values import Option, text
from vtorque_core.base.names import Paths

S = TypeVar("S")

OPTIONS = {
    option.key: option
    for option in (
        Option("ram", text, "", "a word"),
        Option("note", text, "", "any text"),
        Option("script", text, "", "a file", is_file=True),
    )
}
"""The ``-vm`` keys that the contract's jobs use: ``script`` names a file."""


@dataclass(frozen=True)
class PluginSite:
    """Site config that plugins get. Implements :class:`vtorque_core.api.node_job.Site`.

    ``settings`` are objects of the plugin's settings classes.
    """

    paths: Paths = field(default_factory=Paths)
    settings: tuple[object, ...] = ()
    path: Path = Path("/etc/vtorque/vtorque.toml")

    def __getitem__(self, settings: type[S]) -> S:
        """Return the settings of this class. Raises KeyError."""
        for value in self.settings:
            if type(value) is settings:
                return value
        raise KeyError(settings.__name__)


@dataclass(frozen=True)
class ProgramResult:
    """Exit status and output of a program."""

    code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class Submission:
    """Input of the site's submit command.

    Attributes:
        job_id: unique id of the new job.
        argv: arguments without the program's name.
        environ: environment variables.
        script: the script as the batch system stores it; None: no script.
    """

    job_id: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    script: bytes | None


@dataclass(frozen=True)
class HookCall:
    """One call of root's prologue on a node, with that node's adapter."""

    adapter: NodeAdapter
    argv: tuple[str, ...]
    environ: Mapping[str, str]

    def job(self) -> BatchJob:
        """Return the job that the adapter reads from ``argv`` and ``environ``."""
        return self.adapter.job(self.argv, self.environ)


@dataclass(frozen=True)
class ShellCall:
    """Start of the job shell on the first node, where the script must exist.

    ``stdin`` is None for a terminal or no input.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    stdin: bytes | None


@dataclass(frozen=True)
class StartedJob:
    """A started job: the prologue's call on each node, first node first, and the job shell."""

    hooks: tuple[HookCall, ...]
    shell: ShellCall


@dataclass(frozen=True)
class OwnValue:
    """A submit option of the user that the adapter must keep when it attaches the request.

    Attributes:
        argv: the user's arguments: ``("--comment=mine",)``.
        kept: returns True if a submission contains the user's value.
    """

    argv: tuple[str, ...]
    kept: Callable[[Submission], bool]


@dataclass(frozen=True)
class Dialect:
    """Command line syntax of the batch system, and documented properties of its adapter.

    Attributes:
        options: options with values: ``("-N", "t", "-j", "oe")``.
        directive: a directive line: ``"#PBS -N named"``.
        unknown: an unknown option: ``"--no-such-option"``.
        arguments: returns the end of a command line: a script and its arguments.
        share: returns options that request CPUs and MiB of memory on a node.
        exits: exit status from ``NodeAdapter.finish`` for each outcome, if the server answers.
        carries: size in bytes of the largest request that the adapter promises to carry.
        permutes: options may follow the script; otherwise they are arguments of the script.
        takes_stdin: the script may come from standard input.
        array: options for an array of two jobs; empty: not supported.
        two_nodes: options for a job on two nodes; empty: not supported.
        interactive: options for a job with a terminal; empty: not supported.
        own: the user's values of options that the adapter also sets; the adapter must keep them.
    """

    options: tuple[str, ...]
    directive: str
    unknown: str
    arguments: Callable[[str, Sequence[str]], list[str]]
    share: Callable[[int, int], list[str]]
    exits: Mapping[Outcome, int]
    carries: int
    permutes: bool = True
    takes_stdin: bool = True
    array: tuple[str, ...] = ()
    two_nodes: tuple[str, ...] = ()
    interactive: tuple[str, ...] = ()
    own: tuple[OwnValue, ...] = ()


class BatchHarness(Protocol):
    """Simulation of the batch system."""

    @property
    def system(self) -> BatchSystem:
        """Batch system that the plugin registers."""
        ...

    @property
    def site(self) -> Site:
        """Site config for the adapter, for example a :class:`PluginSite`."""
        ...

    @property
    def dialect(self) -> Dialect:
        """Syntax of the batch system."""
        ...

    @property
    def directory(self) -> Path:
        """Working directory of submissions, which contains the tests' scripts."""
        ...

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment of submissions, with a PATH to the simulated submit command."""
        ...

    def last_input(self) -> Submission | None:
        """Return the input of the last submit command since the previous call, or None."""
        ...

    def answer(self, ended: ProgramResult) -> bool:
        """Set the output and exit status of the next submit command.

        Return False if there is no submit command, because the plugin itself is the batch system.
        """
        ...

    def start(
        self, job: Submission, *, nodes: int = 1, element: int = 0, forged: str | None = None
    ) -> StartedJob:
        """Return what the batch system starts for a submitted job.

        Args:
            job: from :meth:`last_input`.
            nodes: number of nodes, as requested.
            element: index in an array: 0 or 1.
            forged: text that the job's owner has put in place of the request, without vsub.
        """
        ...

    def end(self, job: Submission) -> None:
        """Make the batch system forget the job."""
        ...

    def serve(self, up: bool) -> None:
        """Start or stop the batch system's server, which initially runs."""
        ...

    def setup_root(self) -> Path | None:
        """Return a directory in which the adapter's setup steps install their files.

        The directory contains a previous version of each file that a step replaces, such as the
        site's own hooks. Return None if the steps can run only on a real node.
        """
        ...
