"""What an image builder implements. It leaves checking, hashing and the pool to ``vmgr images``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class BuiltImage:
    """What a builder left in the staging directory: file names in it, plus the facts.

    See :class:`vtorque_core.api.values.Image` for the meaning of each field.
    """

    guest_type: str
    distro: str
    arch: str
    min_ram_mib: int
    disk: str | None = None
    disk_format: Literal["raw", "qcow2"] = "qcow2"
    kernel: str | None = None
    initrd: str | None = None
    cmdline: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Building:
    """One build as its builder sees it. Called with a text, it tells that a new step begins.

    Args:
        step: is what a call calls.
        told: gets how much of the step is done, of how much.
        max_disk: bytes of the largest disk that the site allows.
        before: what the image has been, if it is to be updated: what nobody says stays as it was.
        notes: what who builds the image should know, for the builder to add to.
    """

    step: Callable[[str], None]
    told: Callable[[int, int], None]
    max_disk: int = 2 << 40
    before: BuiltImage | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, text: str) -> None:
        """Tell that a new step begins."""
        self.step(text)


class Builder(Protocol):
    """One image builder, made by ``ImageBuilder.builder()``."""

    def build(self, arguments: Mapping[str, str], staging: Path, progress: Building) -> BuiltImage:
        """Build into ``staging`` (empty, root-owned, in the pool), as root. Nothing else of the
        pool is written to. One that only tells steps takes a ``Callable[[str], None]``.

        ``arguments`` are the ``-o key=value`` of ``vmgr images build``. Raises Refused for a bad
        argument and HostFault when a tool fails.
        """
