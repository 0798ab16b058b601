"""``[plugin.survive]``."""

from __future__ import annotations

from vtorque_core.api import dataclass, setting


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
        "for it",
        unit="s",
    )

    checkpoints: str = setting(
        "",
        doc="where checkpoints of jobs go: a directory of root's that is not shared; empty: "
        "there are none",
    )
    quota: int = setting(0, doc="how much of that a user may have on a node; 0: all", unit="MiB")

    def __post_init__(self) -> None:
        """Refuse what could not work. Raises ValueError."""
        for name, value, least in (("look", self.look, 0.1), ("ask", self.ask, 0.5)):
            if not least <= value <= 60:
                raise ValueError(f"{name} is {value:g}: write {least:g} to 60 (s)")
        if self.checkpoints and not is_plain(self.checkpoints):
            raise ValueError(f"checkpoints is {self.checkpoints!r}: write an absolute path")
        if self.quota < 0:
            raise ValueError(f"quota is {self.quota}: write a number of MiB, or 0")


def is_plain(path: str) -> bool:
    """Return whether it is an absolute path without ``..``."""
    return path.startswith("/") and ".." not in path.split("/") and path.isprintable()
