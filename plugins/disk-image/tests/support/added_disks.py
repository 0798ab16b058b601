"""Disks added to a pool like by ``vmgr images add`` and ``update``, without the command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vtorque_core.api import Paths
from vtorque_core.api.image_builder import Building, BuiltImage
from vtorque_core.api.values import Image
from vtorque_disk_image.builder import NAME, DiskBuilder
from vtorque_images import change


class QuietProgress:
    """A progress display that shows nothing."""

    def step(self, text: str) -> None:
        pass

    def told(self, done: int, total: int) -> None:
        pass


def said(
    guest_type: str | None = None,
    distro: str | None = None,
    arch: str | None = None,
    labels: Mapping[str, str] | None = None,
    **more: object,
) -> dict[str, str]:
    """Return the builder's arguments for these properties of a disk."""
    facts = {"guest_type": guest_type, "distro": distro, "arch": arch, **more}
    found = {key: str(value) for key, value in facts.items() if value is not None}
    return {**found, **{f"label.{key}": value for key, value in (labels or {}).items()}}


KNOWN = said("linux", "tiny", "x86_64")


def add(
    pool: Path,
    name: str,
    file: Path,
    arguments: Mapping[str, str],
    progress: QuietProgress,
    *,
    paths: Paths | None = None,
    update: bool = False,
) -> tuple[Image, list[str]]:
    """Make a disk an image; return it and the notes."""

    def make(staging: Path, building: Building) -> BuiltImage:
        return DiskBuilder().build({"file": str(file), **arguments}, staging, building)

    building, options = Building(progress.step, progress.told), change.CommitOptions(paths)
    return change.build(
        pool, name, NAME, make, building, there=update, options=options
    ), building.notes
