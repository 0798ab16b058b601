"""What an image builder implements. The core alone checks, hashes and commits to the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class BuiltImage:
    """What a builder left in the staging directory: file names in it, plus the facts.

    See :class:`vtorque_core.api_node.Image` for the meaning of each field.
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
    labels: Mapping[str, str] = field(default_factory=dict)


class Builder(Protocol):
    """One image builder, made by ``ImageBuilder.builder()``."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        """Build into ``staging`` (empty, root-owned), as root. Never writes to the pool.

        ``arguments`` are the ``-o key=value`` of ``vmgr images build``. Raises Refused for a bad
        argument and HostFault when a tool fails.
        """
        ...
