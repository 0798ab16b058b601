"""What users write for a checkpoint. ``vsub`` imports this."""

from __future__ import annotations

import re

from vtorque_core.api import duration

BEFORE = "before-walltime"
_EVERY = "every:"

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,80}", re.ASCII)


def checkpoint_id(value: str) -> str:
    """Return the id of a checkpoint. Raises ValueError."""
    if value and not _ID.fullmatch(value):
        raise ValueError("is no checkpoint: write the id that vmgr checkpoint has printed")
    return value


def key_of(name: str) -> str:
    """Return the job attempt's key that the id of a checkpoint is of."""
    return re.sub(r"-\d+$", "", name, flags=re.ASCII)


def when(value: str) -> str:
    """Return when a job is to be saved by itself. Raises ValueError."""
    word = value.strip().lower()
    if word and word != BEFORE and not (word.startswith(_EVERY) and interval(word) >= 1):
        raise ValueError(f"is no time to save a job at: write {_EVERY}1h, or {BEFORE}")
    return word


def interval(word: str) -> float:
    """Return the seconds of ``every:1h``. Raises ValueError."""
    return duration(word.removeprefix(_EVERY))
