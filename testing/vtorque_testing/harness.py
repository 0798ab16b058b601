"""What a batch adapter's author gives to the contract suite, and tools for making it.

A harness is a double of the batch system around the real adapter: its submit command records what
it gets, and :meth:`BatchHarness.start` makes of that what the real system would start on the nodes.
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
    """A site config as far as a plugin sees it: :class:`vtorque_core.api.node_job.Site`.

    ``settings``: objects of the plugin's own settings classes.
    """

    paths: Paths = field(default_factory=Paths)
    settings: tuple[object, ...] = ()
    path: Path = Path("/etc/vtorque/vtorque.toml")

    def __getitem__(self, settings: type[S]) -> S:
        """Return the settings of that class. Raises KeyError."""
        for value in self.settings:
            if type(value) is settings:
                return value
        raise KeyError(settings.__name__)


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it wrote."""

    code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class Submission:
    """What the site's submit command received.

    Args:
        job_id: the id that it gave the job; no two submissions have the same.
        argv: its arguments, without the program's name.
        environ: its environment.
        script: the bytes that the batch system keeps as the job's script; None if it has none.
    """

    job_id: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    script: bytes | None


@dataclass(frozen=True)
class HookCall:
    """How root's prologue is called on one node; ``adapter`` is the adapter there."""

    adapter: NodeAdapter
    argv: tuple[str, ...]
    environ: Mapping[str, str]

    def job(self) -> BatchJob:
        """Return what the adapter reads out of the call."""
        return self.adapter.job(self.argv, self.environ)


@dataclass(frozen=True)
class ShellCall:
    """How the job shell is started on the first node; the script has to be there.

    ``stdin``: what it can read; None: it has the job's terminal or nothing.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    stdin: bytes | None


@dataclass(frozen=True)
class StartedJob:
    """A job on its nodes; ``hooks`` are in rank order."""

    hooks: tuple[HookCall, ...]
    shell: ShellCall


@dataclass(frozen=True)
class OwnValue:
    """A user's own value in the place where the request travels, or beside it.

    Args:
        argv: how the user gives it: ``("--comment=mine",)``.
        kept: whether the batch system has it of a submission.
    """

    argv: tuple[str, ...]
    kept: Callable[[Submission], bool]


@dataclass(frozen=True)
class Dialect:
    """How users of this batch system say things, and what its adapter documents.

    Args:
        options: options with values that the submit command takes: ``("-N", "t", "-j", "oe")``.
        directive: a line of a script that the batch system reads: ``"#PBS -N named"``.
        unknown: an option that the submit command does not know: ``"--no-such-option"``.
        arguments: the command line's end for a script and the words it is to get.
        share: the options that ask for CPUs and MiB of memory on a node.
        exits: what ``finish`` returns for each outcome while the server answers.
        carries: bytes of a request, of whatever content, that reach the node at least.
        permutes: whether options may follow the script; else they are the script's arguments.
        takes_stdin: whether a script may come on standard input.
        array: options for an array of two jobs; empty: there are none.
        two_nodes: options for a job on two nodes; empty: there are none.
        interactive: options for a job with a terminal; empty: there are none.
        own: values that the user can give and that must get through.
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
    """The batch system's double."""

    @property
    def system(self) -> BatchSystem:
        """What the plugin registers."""
        ...

    @property
    def site(self) -> Site:
        """The site config for its parts; :class:`PluginSite` will do."""
        ...

    @property
    def dialect(self) -> Dialect:
        """How its users say things."""
        ...

    @property
    def directory(self) -> Path:
        """Where jobs are submitted from; the suite writes its scripts here."""
        ...

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment of submissions: a PATH that finds the double of the submit command."""
        ...

    def received(self) -> Submission | None:
        """Return what the submit command got since the last call; None if it was not started.

        With several calls it is the last.
        """
        ...

    def answer(self, ended: Ended) -> bool:
        """Have the submit command say and end so the next time, once.

        Return False if the adapter has no such command (it is the batch system itself).
        """
        ...

    def start(
        self, job: Submission, *, nodes: int = 1, element: int = 0, forged: str | None = None
    ) -> StartedJob:
        """Return what the batch system starts for a job that was submitted.

        Args:
            job: from :meth:`received`.
            nodes: on how many nodes it runs: as many as were asked for.
            element: of an array, which job: 0 or 1.
            forged: text that the job's owner has put where the request travels, by other means
                than vsub.
        """
        ...

    def end(self, job: Submission) -> None:
        """Have the batch system forget the job."""
        ...

    def serve(self, up: bool) -> None:
        """Have the batch system's server answer, or not, from now on; at first it does."""
        ...

    def setup_root(self) -> Path | None:
        """Return the directory in which the setup steps work here; None: they need the real node.

        It should hold files of the site's own for those that a step replaces.
        """
        ...
