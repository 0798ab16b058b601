"""The declarations of joblog: ``vmgr logs`` and the site's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from vtorque_core.api import Command, Remote, constant_hook, setting

FACILITIES = {
    "kern": 0, "user": 1, "mail": 2, "daemon": 3, "auth": 4, "syslog": 5, "lpr": 6, "news": 7,
    "uucp": 8, "cron": 9, "authpriv": 10, "ftp": 11, "local0": 16, "local1": 17, "local2": 18,
    "local3": 19, "local4": 20, "local5": 21, "local6": 22, "local7": 23,
}  # fmt: skip
"""Numbers of syslog's facilities (RFC 5424, table 1)."""

LEVELS = ("trace", "debug", "info", "warn", "error")
_OWN = ("syslog", "journald", "file")


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.joblog]``. All sinks (syslog, journald, ...) are off by default."""

    syslog: str = setting(
        "", doc="write records to syslog with this facility, such as daemon; empty: do not"
    )
    tag: str = setting("vtorque", doc="identifier of the records in syslog and the journal")
    journald: bool = setting(False, doc="send records with all fields to systemd's journal")
    file: str = setting("", doc="append records of all jobs to this file, one JSON object per line")
    level: str = setting(
        "trace",
        doc="minimum level of the records that these sinks get; [log] level applies before it",
    )

    sinks: tuple[str, ...] = setting((), doc="further sinks, by the names of their entry points")
    uid: int = setting(
        2146890001,
        doc="uid of the process that writes to syslog, journald and further sinks; must "
        "not be the uid of an account",
    )

    @property
    def enabled_sinks(self) -> list[str]:
        """The names of all enabled sinks."""
        return [*(name for name in _OWN if getattr(self, name)), *self.sinks]

    @property
    def unprivileged_sinks(self) -> list[str]:
        """The names of the enabled sinks that run in the unprivileged process."""
        return [name for name in dict.fromkeys(self.enabled_sinks) if name != "file"]

    def __post_init__(self) -> None:
        if self.syslog and self.syslog not in FACILITIES:
            raise ValueError(
                f"syslog={self.syslog!r} is invalid: write one of {', '.join(FACILITIES)}"
            )
        if self.level.lower() not in LEVELS:
            raise ValueError(f"level={self.level!r} is invalid: write one of {', '.join(LEVELS)}")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,32}", self.tag):
            raise ValueError("tag is invalid: write 1 to 32 letters, digits, dots or dashes")
        if self.file and (not self.file.startswith("/") or ".." in PurePath(self.file).parts):
            raise ValueError("file is invalid: write an absolute path without '..'")
        if twice := set(_OWN) & set(self.sinks):
            raise ValueError(
                f"sinks: remove {', '.join(sorted(twice))}, which has its own key "
                "in [plugin.joblog]"
            )
        if not 0 < self.uid < 2**32 - 1:
            raise ValueError(f"uid={self.uid} is invalid: it must be 1 to {2**32 - 2}")


vtorque_settings = constant_hook(Settings)
_TRAVELS = ("follow", "phase", "guest", "level", "as_json", "console", "cloud_init")
vtorque_commands = constant_hook(
    Command("vmgr logs", "vtorque_joblog.command:logs", Remote(_TRAVELS))
)
