"""``[plugin.survive]``."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api import setting

DOCTOR = "doctor"  # in place of a health command


@dataclass(frozen=True)
class Settings:
    """``[plugin.survive]``."""

    look: float = setting(
        0.5,
        doc="how often a node looks whether the batch system has stopped a job's processes here",
        unit="s",
    )
    ask: float = setting(
        1.0,
        doc="how often a node without a process of a job of several nodes asks the batch system "
        "for it, and looks whether its first node has it saved",
        unit="s",
    )

    checkpoints: str = setting(
        "",
        doc="where checkpoints of jobs go: a directory of root's; empty: there are none",
    )
    checkpoints_shared: bool = setting(
        False,
        doc="checkpoints is a directory that all nodes see, in which users' memory lies in the "
        "clear: jobs go on with it on any node of the same kind",
    )
    cpu: str = setting(
        "",
        doc="processor (virsh cpu-models) of guests whose job asks for checkpoints, so that they "
        "go on where there is another that has all of it; empty: the node's own",
    )
    quota: int = setting(0, doc="how much of that a user may have on a node; 0: all", unit="MiB")
    most: int = setting(
        8, doc="of how many jobs a user may have checkpoints, which keep their addresses; 0: any"
    )
    least: float = setting(
        600.0, doc="how often a job may have itself saved at most, by checkpoint=every:", unit="s"
    )
    before: float = setting(
        300.0,
        doc="how long before its walltime ends a job with checkpoint=before-walltime is saved",
        unit="s",
    )
    keep: int = setting(
        2, doc="how many of the checkpoints that a job has by checkpoint= are kept, the last ones"
    )

    health: str = setting(
        "",
        doc="command that says whether a node with jobs is well (exit code 0), or doctor: vtorque "
        "doctor's errors; a node that is ill twice in a row is drained; empty: never",
    )
    health_every: float = setting(300.0, doc="how often that is asked", unit="s")
    spare: tuple[str, ...] = setting(
        (), doc="nodes that the site keeps free: where the jobs of a drained node are moved first"
    )
    drain_most: int = setting(
        2,
        doc="how many nodes may be drained by vTorque, and not be given jobs again yet, for one "
        "that is ill to be drained, too",
    )
    drain_at_once: int = setting(
        1, doc="how many jobs of a drained node are moved or saved at the same time"
    )
    reach: str = setting(
        "",
        doc="how root reaches root of another node, to move guests there (vmgr migrate): a command "
        "with {node} in it, without a shell; empty: guests are not moved",
    )

    def __post_init__(self) -> None:
        """Refuse what could not work. Raises ValueError."""
        for name, value, least in (("look", self.look, 0.1), ("ask", self.ask, 0.5)):
            if not least <= value <= 60:
                raise ValueError(f"{name} is {value:g}: write {least:g} to 60 (s)")
        if self.checkpoints and not is_plain(self.checkpoints):
            raise ValueError(f"checkpoints is {self.checkpoints!r}: write an absolute path")
        for name, value, least in (
            ("least", self.least, 1),
            ("before", self.before, 1),
            ("health_every", self.health_every, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value:g}: write {least} (s) or more")
        for name in ("keep", "drain_at_once", "drain_most"):
            if (number := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {number}: write 1 or more")
        if self.health not in ("", DOCTOR) and not is_plain(self.health):
            raise ValueError(f"health is {self.health!r}: write an absolute path, or {DOCTOR}")
        if self.reach and "{node}" not in self.reach:
            raise ValueError(f"reach is {self.reach!r}: write {{node}} where the node's name goes")
        for name, number in (("quota", self.quota), ("most", self.most)):
            if number < 0:
                raise ValueError(f"{name} is {number}: write a number, or 0")


def is_plain(path: str) -> bool:
    """Return whether it is an absolute path without ``..``."""
    return path.startswith("/") and ".." not in path.split("/") and path.isprintable()
