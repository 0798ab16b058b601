"""``[plugin.local]``."""

from vtorque_core.api import dataclass, setting


@dataclass(frozen=True)
class Settings:
    """``[plugin.local]``."""

    slots: int = setting(1, doc="jobs that run at the same time")
