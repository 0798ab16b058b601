"""``[plugin.local]``: site settings of ``local``."""

from dataclasses import dataclass

from vtorque_core.api import setting

LEAST_PIDS = 64  # a job shell and its helpers need up to 20


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.local]``."""

    slots: int = setting(1, doc="maximum number of running jobs")
    pids: int = setting(
        16384,
        doc="maximum number of processes and threads of a job on this node, without "
        "guests; 0: no limit",
    )

    def __post_init__(self) -> None:
        if self.pids < 0 or 0 < self.pids < LEAST_PIDS:
            raise ValueError(f"pids is {self.pids}: write 0 (no limit), or {LEAST_PIDS} or more")
