"""Values of a declaring module: options, files, images, settings. Stdlib and pluggy only.

``vsub`` imports every enabled plugin's declaring module on each submission, so this module stays
small; what acts on the node, as root, is in :mod:`vtorque_core.api.guest_plan`, domain elements in
:mod:`vtorque_core.api.libvirt_domain`, guest context in :mod:`vtorque_core.api.guest_context`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import pluggy

if TYPE_CHECKING:
    from pathlib import Path


hookspec = pluggy.HookspecMarker("vtorque")
hookimpl = pluggy.HookimplMarker("vtorque")

T = TypeVar("T")
Act = Literal["suspend", "save", "migrate"]  # as virsh calls them


def always(*items: T) -> Callable[[], tuple[T, ...]]:
    """Return a hook that answers with the same items whenever it is called: what a plugin brings.

    ``vtorque_options = always(FPGA)`` in place of a function under ``@hookimpl`` that yields it.
    """
    return hookimpl(lambda: items)


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


def _never(_: Any) -> bool:
    return False


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
        forbids: what cannot be done to the guests of a job that asks for it; whose value is empty,
            0 or false asks for nothing.
        needs: what must be possible with the guests of a job whose value is not ``default``.
        needs_root: whether root must do something on the node for a value: a user's own site
            refuses it.
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
    forbids: frozenset[Act] = frozenset()
    needs: frozenset[Act] = frozenset()
    needs_root: Callable[[T], bool] = _never

    def names_file(self, text: str) -> bool:
        """Return whether this text, as a user writes it, is the path of a file."""
        return self.is_file and text.strip().lower() not in self.words


@dataclass(frozen=True)
class JobRequest:
    """The user's request after parsing and site policy: one typed value for every option.

    ``request[OPTION]`` is typed by the option. ``given`` are the keys the user wrote;
    ``shell`` is the user's own ``-S``, if any; ``of_job``: the keys whose numbers are what the
    batch system gives the job (``vcpus``, ``ram``); ``forbids``: what cannot be done to its guests,
    by the keys because of which; ``needs``: what must be possible with them; ``nodes``: how many
    it is to have, if that is known.
    """

    values: Mapping[str, Any]
    given: frozenset[str] = frozenset()
    shell: str | None = None
    of_job: frozenset[str] = frozenset()
    forbids: Mapping[str, frozenset[Act]] = field(default_factory=dict)
    needs: frozenset[Act] = frozenset()
    nodes: int | None = None

    def __getitem__(self, option: Option[T]) -> T:
        """Return the value of ``option``. Raises KeyError for an option nobody registered."""
        value: T = self.values[option.key]
        return value


@dataclass(frozen=True)
class Extra:
    """What a job needs on each node beside its guests' vCPUs, their RAM and QEMU's own memory.

    ``vsub`` asks the batch system for it (``vtorque_needs``), and guests whose size is the job's
    leave it free. ``cpus``: host CPUs; ``mib``: MiB; ``own``: the guests' vCPUs claim CPUs of their
    own, which those that the site keeps for the host cannot be. ``resources``: how many of what
    else the batch system counts, by its own names (Slurm's ``gres/gpu``, OpenPBS's ``ngpus``);
    ``licenses``: the same, once for the whole job, not for each node.
    """

    cpus: int = 0
    mib: int = 0
    own: bool = False
    resources: Mapping[str, int] = field(default_factory=dict)
    licenses: Mapping[str, int] = field(default_factory=dict)


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


def is_personal(site: object) -> bool:
    """Return whether it is a user's own site, on a machine without one, and they do root's work."""
    return bool(getattr(site, "owner", 0))  # no part of Site: what a site of tests need not have
