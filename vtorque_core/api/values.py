"""Types of options, requests and images. Every ``vsub`` imports this module."""

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


def constant_hook(*items: T) -> Callable[[], tuple[T, ...]]:
    """Return a hook implementation that always returns the same items."""
    return hookimpl(lambda: items)


def text(value: str) -> str:
    """Return ``value`` unchanged. Raises ValueError unless it has 1 to 255 printable characters."""
    if not value or not value.isprintable() or len(value) > 255:
        raise ValueError("must be 1 to 255 printable characters")
    return value


@dataclass(frozen=True)
class FileData:
    """A file named in the request. ``vsub`` reads it as the user and submits its contents.

    ``name`` is the base name, for messages only.
    """

    name: str
    content: bytes


def _reject_all(_: Any) -> bool:
    return False


@dataclass(frozen=True)
class Option(Generic[T]):
    """One ``-vm`` key.

    Attributes:
        key: ``[a-z][a-z0-9_]*``.
        parse: text to value; raises ValueError ("is not a size: ...").
        show: value to text, as a user would write it.
        is_file: the text is a path; ``vsub`` reads this file as the user, and the value is a
            :class:`FileData`. Only texts in ``words`` go to ``parse``, which may return None.
        words: texts such as ``true`` (case ignored) that are not paths, for ``is_file``.
        separator: separates items of a list. The site's ``allow`` and ``deny`` apply to each item.
        forbids: operations (``save``) that are impossible with the guests if the value is true.
        needs: operations that must be possible with the job's guests if the value is not
            ``default``.
        needs_root: returns True if root must act on the node for a value. Personal sites refuse
            such a value.
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
    needs_root: Callable[[T], bool] = _reject_all

    def names_file(self, text: str) -> bool:
        """Return True if this text is the path of a file."""
        return self.is_file and text.strip().lower() not in self.words


@dataclass(frozen=True)
class JobRequest:
    """The user's request after parsing and site policy.

    Attributes:
        values: by key; use ``request[OPTION]``.
        given: keys that the user wrote.
        of_job: keys whose values are computed from the job's allocation.
        forbids: operations that are impossible with the job's guests, by the key that forbids them.
        needs: operations that must be possible with the job's guests.
        nodes: requested minimum number of nodes.
    """

    values: Mapping[str, Any]
    given: frozenset[str] = frozenset()
    shell: str | None = None
    of_job: frozenset[str] = frozenset()
    forbids: Mapping[str, frozenset[Act]] = field(default_factory=dict)
    needs: frozenset[Act] = frozenset()
    nodes: int | None = None

    def __getitem__(self, option: Option[T]) -> T:
        value: T = self.values[option.key]
        return value


@dataclass(frozen=True)
class Extra:
    """Resources per node in addition to the guests' vCPUs, RAM and QEMU's memory.

    Attributes:
        own: each vCPU claims an exclusive CPU. CPUs reserved for the host cannot be exclusive.
        resources: counts by the batch system's names (Slurm: ``gres/gpu``, OpenPBS: ``ngpus``).
        licenses: counts per job, not per node.
    """

    cpus: int = 0
    mib: int = 0
    own: bool = False
    resources: Mapping[str, int] = field(default_factory=dict)
    licenses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Image:
    """An image, as described in its sidecar. All files except ``source`` are owned by root.

    Attributes:
        distro: the Linux distribution, such as ``debian``.
        disk: None for a guest that runs from its initrd.
        source: the user's own file (:class:`vtorque_core.api.ImageSource`), which only a process of
            the user may open. Empty: the image is from the pool.
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
    source: str = ""


def is_personal(site: object) -> bool:
    """Return True for a personal site, which has no root and no admin."""
    return bool(getattr(site, "owner", 0))  # not part of Site, so that tests can omit the attribute
