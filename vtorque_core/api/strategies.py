"""What a plugin brings, as its declaring module says it: guest types, batch systems, builders."""

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
    """What kind of OS a guest is and how a job runs in it.

    Args:
        name: as image sidecars say it, e.g. ``"linux"``.
        supports: names of the context items that its guests can apply (``"EnvVar"``, ...: class
            names of :mod:`vtorque_core.api.guest_context`, which this module must not import).
        driver: called on the node and in the job shell, never by ``vsub``.
        check_script: what ``vsub`` asks of a job's script before it is submitted; returns why it
            cannot run in a guest of that image. None: anything can. A courtesy: the driver looks
            again.
    """

    name: str
    supports: frozenset[str]
    driver: Callable[[], GuestDriver]
    check_script: Callable[[bytes, Image], Iterable[Refusal]] | None = None


StepOf = Callable[[str, str, Sequence[str], bool], list[str]]
"""From job id, one of its nodes, a command and whether it is to have the terminal: see below."""


@dataclass(frozen=True)
class BatchSystem:
    """One batch system: ``submitter`` for ``vsub`` and ``vmgr``, ``node`` for root's hooks.

    Both get the site config. ``shell`` is for the job shell, which reads none. ``facts``: which of
    queue, partition, account and qos a BatchJob of its has; ``[[limits]]`` can go by these alone.

    ``step``: returns how a command is run on a node of a running job, from any host, as the job's
    owner: what makes of it the command that is called instead, with its streams and exit code.
    None, or that answer: the batch system has no way of its own.

    ``knows_all_nodes``: a job that its ``node`` says is gone is so everywhere, and not only here.
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
    """One way to make an image: ``vmgr images build <name>``. ``builder`` is called as root."""

    name: str
    summary: str
    builder: Callable[[], Builder]


@dataclass(frozen=True)
class OfJob:
    """That a command is about a job, its argument ``job_id``, and looks at the job's own node.

    A plugin may then run it there when it is called elsewhere (``vtorque_elsewhere``).

    Args:
        travels: names of the other parameters with which it may be. What is asked of it comes
            from the job's owner, or from code in their guests: with these it must write no file,
            read none that they name, and run nothing but on behalf of the guest.
        terminal: it talks to the user's terminal, unless it is called with trailing words.
        output: name of the parameter that names a file which it writes: ``-`` then travels, and
            what the command prints becomes that file where it was called.
    """

    travels: tuple[str, ...] = ()
    terminal: bool = False
    output: str = ""


@dataclass(frozen=True)
class Command:
    """A click command added to ``vmgr`` or ``vtorque``, never to ``vsub``.

    ``words``: what is typed, ``"vmgr cards"``, or of a group ``"vmgr images sync"``; the last one
    is the command's own name. ``load`` imports it: only when it is used, or listed.
    """

    words: str
    load: Callable[[], click.Command]
    of_job: OfJob | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if no program is named."""
        if len(self.words.split()) < 2:
            raise ValueError(f'a Command of {self.words!r}: write its program, too: "vmgr cards"')
