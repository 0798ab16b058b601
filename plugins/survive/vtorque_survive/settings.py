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

    def __post_init__(self) -> None:
        """Refuse what could not work. Raises ValueError."""
        for name, value, least in (("look", self.look, 0.1), ("ask", self.ask, 0.5)):
            if not least <= value <= 60:
                raise ValueError(f"{name} is {value:g}: write {least:g} to 60 (s)")
