"""``[plugin.survive]``: site settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import Paths, setting

DOCTOR = "doctor"  # value instead of a health command


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.survive]``."""

    poll_interval: float = setting(
        0.5,
        doc="how often a node checks whether the batch system has suspended a job's processes",
        unit="s",
    )
    query_interval: float = setting(
        1.0,
        doc="how often the other nodes of a multi-node job query the batch system about "
        "it, and check whether its first node has saved it",
        unit="s",
    )

    checkpoints: str = setting(
        "", doc="directory for checkpoints, which only root can access; empty: no checkpoints"
    )
    checkpoints_shared: bool = setting(
        False,
        doc="all nodes mount the directory checkpoints, which has users' memory in plain "
        "text; jobs can be restored on any node of the same kind",
    )
    cpu_model: str = setting(
        "",
        doc="CPU model (virsh cpu-models) of guests whose job requests checkpoints, so "
        "that nodes with other processors can restore them; empty: the node's own",
    )
    checkpoint_quota: int = setting(
        0, doc="maximum size of a user's checkpoints on a node; 0: no limit", unit="MiB"
    )
    max_checkpointed_jobs: int = setting(
        8,
        doc="maximum number of jobs of a user with checkpoints, which keep their "
        "addresses; 0: no limit",
    )
    min_checkpoint_interval: float = setting(
        600.0, doc="minimum time between two automatic checkpoints (checkpoint=every:)", unit="s"
    )
    checkpoint_before_end: float = setting(
        300.0,
        doc="how long before the end of its walltime a job with "
        "checkpoint=before-walltime is saved",
        unit="s",
    )
    kept_checkpoints: int = setting(
        2, doc="number of checkpoints that are kept for a job with checkpoint="
    )

    health_command: str = setting(
        "",
        doc="health check of a node with jobs: a command (exit status 0: healthy), or "
        "doctor; a node that fails twice in a row is drained; empty: none",
    )
    health_interval: float = setting(300.0, doc="time between two health checks", unit="s")
    spare_nodes: tuple[str, ...] = setting(
        (), doc="spare nodes: the first choice for migrating jobs of a drained node"
    )
    max_drained_nodes: int = setting(
        2, doc="no automatic drain while this many nodes are drained by vTorque"
    )
    drain_parallelism: int = setting(
        1, doc="number of jobs of a drained node that are migrated or saved at the same time"
    )
    remote_command: str = setting(
        "",
        doc="command that runs words as root on another node, for vmgr migrate; {node} "
        "is replaced, no shell is used; empty: no migration",
    )

    def __post_init__(self) -> None:
        """Reject invalid values with a ValueError."""
        for name, value, least in (
            ("poll_interval", self.poll_interval, 0.1),
            ("query_interval", self.query_interval, 0.5),
        ):
            if not least <= value <= 60:
                raise ValueError(f"{name}={value:g} is invalid: write {least:g} to 60 (s)")
        if self.checkpoints and not is_plain(self.checkpoints):
            raise ValueError(f"checkpoints={self.checkpoints!r} is not an absolute path")
        for name, value, least in (
            ("min_checkpoint_interval", self.min_checkpoint_interval, 1),
            ("checkpoint_before_end", self.checkpoint_before_end, 1),
            ("health_interval", self.health_interval, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value:g} is too small: write {least} (s) or more")
        for name in ("kept_checkpoints", "drain_parallelism", "max_drained_nodes"):
            if (number := getattr(self, name)) < 1:
                raise ValueError(f"{name}={number} is too small: write 1 or more")
        if self.health_command not in ("", DOCTOR) and not is_plain(self.health_command):
            raise ValueError(
                f"health_command={self.health_command!r} is invalid: write an absolute path, or "
                f"{DOCTOR}"
            )
        if self.remote_command and "{node}" not in self.remote_command:
            raise ValueError(f"remote_command={self.remote_command!r}: it must contain {{node}}")
        for name, number in (
            ("checkpoint_quota", self.checkpoint_quota),
            ("max_checkpointed_jobs", self.max_checkpointed_jobs),
        ):
            if number < 0:
                raise ValueError(f"{name}={number} is invalid: write a number, or 0 for no limit")


def is_plain(path: str) -> bool:
    """Return whether a path is printable, absolute and without ``..``."""
    return path.startswith("/") and ".." not in path.split("/") and path.isprintable()


def moves_directory(paths: Paths) -> Path:
    """Return the directory of this node's records of migrated guests."""
    return paths.state / "moves"
