"""The settings ``[plugin.osv]`` and the option ``-vm osv_mode``."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api import Option, setting

MODES = ("cmdline", "rest")


def mode(text: str) -> str:
    """Parse the value of ``-vm osv_mode``. Raises ValueError."""
    if text not in MODES:
        raise ValueError(f"must be {' or '.join(MODES)}")
    return text


OSV_MODE = Option(
    "osv_mode",
    mode,
    "cmdline",
    "how the job is passed to OSv: cmdline (at boot, no open port) or rest (by its REST server)",
    "MODE",
)


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.osv]``."""

    rest: bool = setting(
        False, doc="allow osv_mode=rest, which runs a server without authentication in each guest"
    )
    rest_timeout: float = setting(
        30.0, doc="how long a job waits for a booting guest's REST server to start", unit="s"
    )
