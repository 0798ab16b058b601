"""Interface of an image builder. ``vmgr images`` validates, hashes and stores the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class BuiltImage:
    """Result of a builder: file names in the staging directory, and facts as in :class:`Image`."""

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
    """Progress and limits of one build. Call the object with a text to report a new step.

    Attributes:
        told: called with the completed and the total work of the current step.
        max_disk: maximum size of the disk in bytes.
        before: the image to update. It supplies values that the builder cannot determine.
        notes: lines for the user, which the builder appends.
    """

    step: Callable[[str], None]
    told: Callable[[int, int], None]
    max_disk: int = 2 << 40
    before: BuiltImage | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, text: str) -> None:
        """Report that the step ``text`` begins."""
        self.step(text)


class Builder(Protocol):
    """An image builder, created by ``ImageBuilder.builder()``."""

    def build(self, arguments: Mapping[str, str], staging: Path, progress: Building) -> BuiltImage:
        """Build an image in the empty directory ``staging``. As root.

        Raises Refused if an argument is invalid, HostFault if a tool fails.
        """
