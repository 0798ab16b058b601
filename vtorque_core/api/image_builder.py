"""Interface of an image builder. ``vmgr images`` validates, hashes and stores the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class BuiltImage:
    """Result of a builder: file names in the staging directory, and facts.

    For the fields see :class:`vtorque_core.api.values.Image`.
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
    """Progress and limits of one build. Call it with a text to report a new step.

    Attributes:
        told: called with (done, total) of a step.
        max_disk: size limit of a disk in bytes.
        before: the image to update; its values are the defaults.
        notes: the builder adds notes for the person who builds the image.
    """

    step: Callable[[str], None]
    told: Callable[[int, int], None]
    max_disk: int = 2 << 40
    before: BuiltImage | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, text: str) -> None:
        """Report a new step."""
        self.step(text)


class Builder(Protocol):
    """An image builder, created by ``ImageBuilder.builder()``."""

    def build(self, arguments: Mapping[str, str], staging: Path, progress: Building) -> BuiltImage:
        """Build an image, as root.

        ``arguments`` are the ``-o key=value`` options of ``vmgr images build``. ``staging`` is an
        empty root-owned directory in the pool; write nothing else in the pool.

        Raises:
            Refused: an argument is invalid.
            HostFault: a tool fails.
        """
