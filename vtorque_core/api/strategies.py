"""Types that hooks of the entry-point group ``vtorque1`` return, such as guest types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vtorque_core.api.values import Image, JobRequest
from vtorque_core.base.errors import Refusal

if TYPE_CHECKING:
    import click

    from vtorque_core.api.batch_system import JobShell, NodeAdapter, Submitter
    from vtorque_core.api.guest_driver import GuestDriver
    from vtorque_core.api.guest_plan import Share
    from vtorque_core.api.image_builder import Builder
    from vtorque_core.api.node_job import Site


def import_object(name: str) -> Any:
    """Import and return an object. ``name`` is ``module:object``, as in entry points."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def deferred(name: str) -> Callable[..., Any]:
    """Return a function that imports another function, calls it and returns its result.

    Use ``deferred`` in declarations for code that ``vsub`` does not run.

    Args:
        name: the function or class, as in :func:`import_object`.
    """

    def call(*args: Any, **given: Any) -> Any:
        return import_object(name)(*args, **given)

    return call


@dataclass(frozen=True)
class GuestType:
    """An operating system of guests, and how jobs run in it.

    Attributes:
        name: as in image sidecars: ``"linux"``.
        supports: class names of supported context items. Do not import these classes.
        check_script: called by ``vsub``; returns the reasons why the script cannot run in a guest
            of the image. The driver must check again.
    """

    name: str
    supports: frozenset[str]
    driver: Callable[[], GuestDriver]
    check_script: Callable[[bytes, Image], Iterable[Refusal]] | None = None


StepOf = Callable[[str, str, Sequence[str], bool], list[str]]
"""Function of job id, node, command and terminal flag, which returns a command line."""


@dataclass(frozen=True)
class BatchSystem:
    """One batch system.

    Attributes:
        facts: which of ``queue``, ``partition``, ``account`` and ``qos`` its BatchJob sets.
            ``[[limits]]`` can select jobs by these fields.
        step: returns a function that wraps a command; None if users cannot run commands on nodes.
            The wrapped command runs on a node of a running job, as the job's owner, and keeps
            streams and exit status.
        knows_all_nodes: True if the NodeAdapter reports a job as gone only after its end on all
            nodes.
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
    builder: Callable[[], Builder]


@dataclass(frozen=True)
class ImageSource:
    """Images of users, for values of ``-vm img=`` with a slash or a colon.

    Attributes:
        base: takes a value of ``img``. Returns the name of the pool's image that provides kernel
            and initrd, or an empty string. If it returns ``own``, ``vsub`` builds a missing image
            ``own`` on a personal site.
        resolve: called by ``vsub`` as the user. Returns ``-vm`` pairs that replace those of the
            request. Its last argument is False with ``--no-pull``.
        image: returns the image of a submitted, untrusted request. Opens no file. Its last
            argument finds an image of the pool by name.
        shares: returns the shares of a submitted, untrusted request. Its other arguments
            are the owner's home and the site's shares.
        mine: returns the caller's images, for ``vmgr images list --mine``.
        remove: removes an image of the caller; False if it does not exist.
    """

    base: Callable[[str], str]
    resolve: Callable[[JobRequest, Site, bool], Mapping[str, str]]
    image: Callable[[JobRequest, Site, Callable[[str], Image]], Image]
    shares: Callable[[JobRequest, str, Sequence[Share]], Sequence[Share]]
    mine: Callable[[Site], Sequence[Mapping[str, str | int]]]
    remove: Callable[[Site, str], bool]


@dataclass(frozen=True)
class Remote:
    """Marks a command that reads data on a job's node. The job is the argument ``job_id``.

    On other hosts, a plugin can forward the command to that node (``vtorque_remote_command``).

    Attributes:
        travels: other parameters that may be forwarded. Code in guests can forge their values.
            A value must not make the command write a file, read a file that the value names, or run
            a program outside the guest.
        terminal: the command is interactive unless further words follow, as in ``vmgr ssh JOB ls``.
        output: the parameter for an output file. The calling host writes the file.
    """

    travels: tuple[str, ...] = ()
    terminal: bool = False
    output: str = ""


@dataclass(frozen=True)
class Command:
    """A click command added to ``vmgr`` or ``vtorque``.

    ``words`` are program, groups and name (``"vmgr images sync"``). ``load`` is a name for
    :func:`import_object`, or a function that returns the command. ``load`` is imported or called
    when the command is used or listed.
    """

    words: str
    load: str | Callable[[], click.Command]
    of_job: Remote | None = None

    def __post_init__(self) -> None:
        if len(self.words.split()) < 2:
            raise ValueError(f'{self.words!r} must be a program and a command, like "vmgr cards"')

    def import_command(self) -> click.Command:
        """Import or create the command."""
        found: click.Command = self.load() if callable(self.load) else import_object(self.load)
        return found
