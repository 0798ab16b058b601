"""The settings of remote commands about jobs: ``[plugin.login]``."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api import setting


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.login]``."""

    poll_interval: float = setting(
        1.0,
        doc="Torque and OpenPBS without [plugin.pbs] ssh: how often a job polls its "
        "owner's home for requests",
        unit="s",
    )
    answer_timeout: float = setting(
        20.0,
        doc="Torque and OpenPBS without [plugin.pbs] ssh: how long a command waits for "
        "the job's answer",
        unit="s",
    )

    def __post_init__(self) -> None:
        if not 0.1 <= self.poll_interval <= 60:
            raise ValueError(
                f"poll_interval={self.poll_interval:g} is invalid: write 0.1 to 60 (s)"
            )
        if self.answer_timeout < 2 * self.poll_interval:
            raise ValueError(
                f"answer_timeout={self.answer_timeout:g} (s) is too short: it must be at least "
                f"twice poll_interval, {2 * self.poll_interval:g} s"
            )
