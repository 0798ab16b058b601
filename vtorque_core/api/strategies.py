"""Types that a declaring module returns: guest types, batch systems, image builders, commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtorque_core.api.values import Image
from vtorque_core.base.errors import Refusal

if TYPE_CHECKING:
    import click

    from vtorque_core.api.batch_system import JobShell, NodeAdapter, Submitter
    from vtorque_core.api.guest_driver import GuestDriver
    from vtorque_core.api.image_builder import Builder
    from vtorque_core.api.node_job import Site


@dataclass(frozen=True)
class GuestType:
    """An operating system of guests, and how jobs run in it.

    Attributes:
        name: as in image sidecars: ``"linux"``.
        supports: class names of the supported items of :mod:`vtorque_core.api.guest_context`, which
            declaring modules must not import.
        driver: called on the node and in the job shell, never by ``vsub``.
        check_script: called by ``vsub`` before submission; returns why the script cannot run in a
            guest of the image. The driver must check again.
    """

    name: str
    supports: frozenset[str]
    driver: Callable[[], GuestDriver]
    check_script: Callable[[bytes, Image], Iterable[Refusal]] | None = None


StepOf = Callable[[str, str, Sequence[str], bool], list[str]]
"""Function of job id, node, command and terminal flag; see :class:`BatchSystem`."""


@dataclass(frozen=True)
class BatchSystem:
    """One batch system.

    Attributes:
        submitter: for ``vsub`` and ``vmgr``.
        node: for root's hooks.
        shell: for the job shell.
        facts: those of queue, partition, account and qos that its BatchJob sets. Only these work in
            ``[[limits]]``.
        step: returns a function that wraps a command to run on a node of a running job, from any
            host, as the job's owner, with its streams and exit status. None, also as result: not
            available.
        knows_all_nodes: if ``node`` reports a job as gone, it is gone on all nodes.
    """

    name: str
    submitter: Callable[[Site], Submitter]
    node: Callable[[Site], NodeAdapter]
    shell: Callable[[], JobShell]
    facts: frozenset[str] = frozenset()
    step: Callable[[Site], StepOf | None] | None = None
    knows_all_nodes: bool = False


@dataclass(frozen=True)
class ImageBuilder:
    """An image builder for ``vmgr images build <name>``. ``builder`` is called as root."""

    name: str
    summary: str
    builder: Callable[[], Builder]


@dataclass(frozen=True)
class OfJob:
    """Marks a command with the argument ``job_id`` that reads data on the job's own node.

    A plugin can then run it there (``vtorque_elsewhere``).

    Attributes:
        travels: names of the other parameters that may be forwarded. Requests come from the job's
            owner or from code in the guests. With these parameters the command must not write
            files, read files that they name, or run anything except on behalf of the guest.
        terminal: the command uses the terminal unless it has trailing words.
        output: the parameter for an output file. ``-`` is forwarded instead, and the output is
            written to the file on the calling host.
    """

    travels: tuple[str, ...] = ()
    terminal: bool = False
    output: str = ""


@dataclass(frozen=True)
class Command:
    """A click command added to ``vmgr`` or ``vtorque``.

    Attributes:
        words: program, groups and the command's own name: ``"vmgr images sync"``.
        load: imports the command when it is used or listed.
    """

    words: str
    load: Callable[[], click.Command]
    of_job: OfJob | None = None

    def __post_init__(self) -> None:
        if len(self.words.split()) < 2:
            raise ValueError(f'{self.words!r} has no program: write it, as in "vmgr cards"')
