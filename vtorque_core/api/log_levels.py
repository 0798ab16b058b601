"""Parse log levels: ``debug``, or ``ALL:WARN,boot:DEBUG,iocm:TRACE`` by phase and plugin."""

from __future__ import annotations

import re
from collections.abc import Mapping

TRACE, DEBUG, INFO, WARN, ERROR, QUIET = 5, 10, 20, 30, 40, 100
LEVELS = {
    "TRACE": TRACE, "DEBUG": DEBUG, "INFO": INFO, "WARN": WARN, "WARNING": WARN, "ERROR": ERROR,
    "QUIET": QUIET,
}  # fmt: skip
ALL = "ALL"
_COMPONENT = re.compile(r"[a-z][a-z0-9-]{0,60}", re.ASCII)
_MOST = 20  # components of one text
_MAX_TEXT = 1024


class Levels(int):
    """A log level for each component (plugin or phase), which drops messages of lower levels.

    The int is ``QUIET`` minus the lowest of these levels: 0 logs nothing, 95 everything. The site's
    limit of ``-vm log`` is a limit of this int.
    """

    of: Mapping[str, int]
    text: str

    def __new__(cls, of: Mapping[str, int], text: str = "") -> Levels:
        """Create levels from a map of components (or ALL) to levels."""
        self = super().__new__(cls, QUIET - min(of.values(), default=QUIET))
        self.of = dict(of)
        self.text = text
        return self

    def minimum(self, plugin: str, phase: str) -> int:
        """Return the minimum level for a plugin (or ``core``) in a phase of the job.

        If both plugin and phase have a level, the more verbose level applies. If neither has a
        level, the level of ALL applies.
        """
        named = [self.of[name] for name in (plugin, phase.replace(" ", "-")) if name in self.of]
        return min(named, default=self.of.get(ALL, QUIET))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Levels({self.text!r})"


NOTHING = Levels({})
"""No log level requested."""


def plugin_of(logger: str) -> str:
    """Return the plugin of a logger with a name such as ``vtorque_linux_guest.job``."""
    return logger.partition(".")[0].removeprefix("vtorque_").replace("_", "-")


def parse(text: str) -> Levels:
    """Parse ``debug`` or ``ALL:WARN,boot:DEBUG``; ``+`` can replace commas. Raises ValueError."""
    found: dict[str, int] = {}
    words = [word.strip() for word in re.split(r"[,+]", text[: _MAX_TEXT + 1]) if word.strip()]
    if not words or len(text) > _MAX_TEXT or len(words) > _MOST:
        raise ValueError(
            f"is not a log level: write one of {_names()}, or up to {_MOST} pairs COMPONENT:LEVEL"
        )
    for word in words:
        component, colon, level = word.rpartition(":")
        name = ALL if not colon or component.upper() == ALL else component
        if level.upper() not in LEVELS:
            raise ValueError(f"has the unknown level {level[:40]!r}: write one of {_names()}")
        if name != ALL and not _COMPONENT.fullmatch(name):
            raise ValueError(
                f"has the unknown component {name[:40]!r}: write ALL, core, "
                "a phase such as boot, or a plugin such as iocm"
            )
        if name in found:
            raise ValueError(f"names {name} twice")
        found[name] = LEVELS[level.upper()]
    return Levels(found, ",".join(f"{n}:{name_of(v)}" for n, v in found.items()))


def name_of(level: int) -> str:
    """Return the name of a level, or of the next lower level that has a name."""
    known = sorted((number, name) for name, number in LEVELS.items() if name != "WARNING")
    return next((name for number, name in reversed(known) if number <= level), "TRACE")


def _names() -> str:
    return ", ".join(name.lower() for name in LEVELS if name != "WARNING")
