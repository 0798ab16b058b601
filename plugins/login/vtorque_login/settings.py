"""``[plugin.login]``."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api import setting


@dataclass(frozen=True)
class Settings:
    """``[plugin.login]``."""

    look: float = setting(
        1.0,
        doc="Torque, OpenPBS without [plugin.pbs] ssh: how often a job looks for requests in its "
        "owner's home",
        unit="s",
    )
    wait: float = setting(20.0, doc="how long a command waits for the job's answer there", unit="s")

    def __post_init__(self) -> None:
        """Refuse what could not work. Raises ValueError."""
        if not 0.1 <= self.look <= 60:
            raise ValueError(f"look is {self.look:g}: write 0.1 to 60 (s)")
        if self.wait < 2 * self.look:
            raise ValueError(f"wait is {self.wait:g}: the least is twice look, {2 * self.look:g} s")
