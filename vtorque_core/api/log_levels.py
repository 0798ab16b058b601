"""How much is logged: ``debug``, or by phase and plugin ``ALL:WARN,boot:DEBUG,iocm:TRACE``. Pure.

On the path of every ``vsub``: it does not import :mod:`logging`, whose numbers these are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TRACE, DEBUG, INFO, WARN, ERROR, QUIET = 5, 10, 20, 30, 40, 100
LEVELS = {
    "TRACE": TRACE,
    "DEBUG": DEBUG,
    "INFO": INFO,
    "WARN": WARN,
    "WARNING": WARN,
    "ERROR": ERROR,
    "QUIET": QUIET,
}
ALL = "ALL"
_COMPONENT = re.compile(r"[a-z][a-z0-9-]{0,60}", re.ASCII)
_MOST = 20  # components of one text
_MAX_TEXT = 1024


class Levels(int):
    """The least level that is logged, by component; as a number it grows with what is logged.

    So a site's ``max`` for ``-vm log`` is the most that a job may have logged of anything:
    0 nothing, 60 errors, 70 warnings, 80 information, 90 debugging, 95 all.
    """

    of: Mapping[str, int]
    text: str

    def __new__(cls, of: Mapping[str, int], text: str = "") -> Levels:
        """Make it from component (or ALL) to level."""
        self = super().__new__(cls, QUIET - min(of.values(), default=QUIET))
        self.of = dict(of)
        self.text = text
        return self

    def least(self, plugin: str, phase: str) -> int:
        """Return the least level of what a plugin (or ``core``) logs in a phase of the job.

        If both are named the one that has more logged counts; if none is, that of ALL.
        """
        named = [self.of[name] for name in (plugin, phase.replace(" ", "-")) if name in self.of]
        return min(named, default=self.of.get(ALL, QUIET))

    def __str__(self) -> str:
        """Return it as it was written."""
        return self.text

    def __repr__(self) -> str:
        """Return it as it was written, for failures of tests."""
        return f"Levels({self.text!r})"


NOTHING = Levels({})
"""No word on how much is logged."""


def plugin_of(logger: str) -> str:
    """Return the plugin that a logger is of, by its package: ``vtorque_linux_guest.job``."""
    return logger.partition(".")[0].removeprefix("vtorque_").replace("_", "-")


def parse(text: str) -> Levels:
    """Return the levels of ``debug``, ``ALL:WARN,boot:DEBUG``; ``+`` is as good as a comma.

    Raises ValueError saying what is wrong.
    """
    found: dict[str, int] = {}
    words = [word.strip() for word in re.split(r"[,+]", text[: _MAX_TEXT + 1]) if word.strip()]
    if not words or len(text) > _MAX_TEXT or len(words) > _MOST:
        raise ValueError(
            f"is no log level: write one of {_names()}, or up to {_MOST} of COMPONENT:LEVEL"
        )
    for word in words:
        component, colon, level = word.rpartition(":")
        name = ALL if not colon or component.upper() == ALL else component
        if level.upper() not in LEVELS:
            raise ValueError(f"has the level {level[:40]!r}: there are {_names()}")
        if name != ALL and not _COMPONENT.fullmatch(name):
            raise ValueError(
                f"has the component {name[:40]!r}: write ALL, a phase such as boot, core, or a "
                "plugin's name such as iocm"
            )
        if name in found:
            raise ValueError(f"names {name} twice")
        found[name] = LEVELS[level.upper()]
    return Levels(found, ",".join(f"{n}:{name_of(v)}" for n, v in found.items()))


def name_of(level: int) -> str:
    """Return a level's name; the next lower one's for a number between."""
    known = sorted((number, name) for name, number in LEVELS.items() if name != "WARNING")
    return next((name for number, name in reversed(known) if number <= level), "TRACE")


def _names() -> str:
    return ", ".join(name.lower() for name in LEVELS if name != "WARNING")
