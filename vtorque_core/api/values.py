"""The public API that a plugin's declaring module imports: stdlib and pluggy only.

``vsub`` imports every enabled plugin's declaring module on each submission, so this module stays
small; what acts on the node, as root, is in :mod:`vtorque_core.api_node`, domain elements in
:mod:`vtorque_core.api_domain`, guest context in :mod:`vtorque_core.api_context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import pluggy

from vtorque_core.errors import Conflict, HostFault, Refusal, Refused, UsageError
from vtorque_core.units import BOOLEAN_WORDS, boolean, count, duration, show_mib, size_mib, walltime

if TYPE_CHECKING:
    from pathlib import Path

    import click

    from vtorque_core.api_batch import JobShell, NodeAdapter, Submitter
    from vtorque_core.api_guest import GuestDriver
    from vtorque_core.api_image import Builder
    from vtorque_core.api_node import Site

__all__ = [
    "BOOLEAN_WORDS",
    "BatchSystem",
    "Command",
    "Conflict",
    "Extra",
    "FileData",
    "GuestType",
    "HostFault",
    "Image",
    "ImageBuilder",
    "JobRequest",
    "Option",
    "Refusal",
    "Refused",
    "UsageError",
    "boolean",
    "count",
    "duration",
    "hookimpl",
    "hookspec",
    "setting",
    "show_mib",
    "size_mib",
    "text",
    "walltime",
]

hookspec = pluggy.HookspecMarker("vtorque")
hookimpl = pluggy.HookimplMarker("vtorque")

T = TypeVar("T")


def text(value: str) -> str:
    """Parse a plain one-line word. Raises ValueError for empty or unprintable text."""
    if not value or not value.isprintable() or len(value) > 255:
        raise ValueError("must be 1 to 255 printable characters")
    return value


@dataclass(frozen=True)
class FileData:
    """A file that the user named in the request: read as the user at submission, travels as data.

    ``name`` is its base name, for messages only; ``content`` are its bytes.
    """

    name: str
    content: bytes


@dataclass(frozen=True)
class Option(Generic[T]):
    """One ``-vm`` key.

    Args:
        key: what the user writes; ``[a-z][a-z0-9_]*``.
        parse: text to value; raises ValueError with what is wrong ("is not a size: ...").
        default: the value without ``-vm key=`` and without ``[options.<key>] default``.
        help: one line for ``vsub -h``.
        metavar: the value's place holder in help.
        show: value to text, as the user would have written it.
        is_file: the user's text is a path, read as the user by ``vsub``; the value is a
            :class:`FileData` or None and ``parse`` is not called.
        words: with ``is_file``: texts, in any case, that are no path but for ``parse``.
        separator: the value is a list, as ``show`` writes it: the site's ``allow`` and ``deny``
            are for each item.
    """

    key: str
    parse: Callable[[str], T]
    default: T
    help: str
    metavar: str = "VALUE"
    show: Callable[[T], str] = str
    is_file: bool = False
    words: frozenset[str] = frozenset()
    separator: str = ""

    def names_file(self, text: str) -> bool:
        """Return whether this text, as a user writes it, is the path of a file."""
        return self.is_file and text.strip().lower() not in self.words


@dataclass(frozen=True)
class JobRequest:
    """The user's request after parsing and site policy: one typed value for every option.

    ``request[OPTION]`` is typed by the option. ``given`` are the keys the user wrote;
    ``shell`` is the user's own ``-S``, if any.
    """

    values: Mapping[str, Any]
    given: frozenset[str] = frozenset()
    shell: str | None = None

    def __getitem__(self, option: Option[T]) -> T:
        """Return the value of ``option``. Raises KeyError for an option nobody registered."""
        value: T = self.values[option.key]
        return value


@dataclass(frozen=True)
class Extra:
    """What a job needs on each node beside its guests' vCPUs, their RAM and QEMU's own memory.

    ``vsub`` asks the batch system for it (``vtorque_needs``). ``cpus``: host CPUs; ``mib``: MiB.
    """

    cpus: int = 0
    mib: int = 0


@dataclass(frozen=True)
class Image:
    """An image of the pool as its sidecar describes it; all paths are root-owned files.

    ``disk`` is None for a guest that lives in its initrd. ``disk_format`` is raw or qcow2.
    ``distro`` is the family member (``debian``, ``rocky``, ``micro``, ...); ``labels`` are free.
    """

    name: str
    guest_type: str
    distro: str
    arch: str
    sha256: str
    min_ram_mib: int = 64
    disk: Path | None = None
    disk_format: Literal["raw", "qcow2"] = "qcow2"
    kernel: Path | None = None
    initrd: Path | None = None
    cmdline: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GuestType:
    """What kind of OS a guest is and how a job runs in it.

    Args:
        name: as image sidecars say it, e.g. ``"linux"``.
        supports: names of the context items that its guests can apply (``"EnvVar"``, ...: class
            names of :mod:`vtorque_core.api_context`, which this module must not import).
        driver: called on the node and in the job wrapper, never by ``vsub``.
        check_script: what ``vsub`` asks of a job's script before it is submitted; returns why it
            cannot run in a guest of that image. None: anything can. A courtesy: the driver looks
            again.
    """

    name: str
    supports: frozenset[str]
    driver: Callable[[], GuestDriver]
    check_script: Callable[[bytes, Image], Iterable[Refusal]] | None = None


@dataclass(frozen=True)
class BatchSystem:
    """One batch system: ``submitter`` for ``vsub`` and ``vmgr``, ``node`` for root's hooks.

    Both get the site config. ``shell`` is for the job shell, which reads none.
    """

    name: str
    submitter: Callable[[Site], Submitter]
    node: Callable[[Site], NodeAdapter]
    shell: Callable[[], JobShell]


@dataclass(frozen=True)
class ImageBuilder:
    """One way to make an image: ``vmgr images build <name>``. ``builder`` is called as root."""

    name: str
    summary: str
    builder: Callable[[], Builder]


@dataclass(frozen=True)
class Command:
    """A click command added to ``vmgr`` or ``vtorque`` (``program``); never to ``vsub``."""

    program: str
    load: Callable[[], click.Command]


def setting(
    default: Any = MISSING, *, doc: str, unit: str | None = None, secret_file: bool = False
) -> Any:
    """Declare one key of a plugin's ``[plugin.<name>]`` table, as a dataclass field.

    Args:
        default: without one the key must be set by the site.
        doc: one line for ``vtorque config example``.
        unit: ``"MiB"`` or ``"s"``: the TOML value may then be a size or duration in text.
        secret_file: the value is the path of a file that only root may read.
    """
    return field(default=default, metadata={"doc": doc, "unit": unit, "secret_file": secret_file})
