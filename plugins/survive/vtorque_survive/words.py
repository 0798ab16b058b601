"""What users write for a checkpoint. ``vsub`` imports this."""

from __future__ import annotations

import re

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,80}", re.ASCII)


def checkpoint_id(value: str) -> str:
    """Return the id of a checkpoint. Raises ValueError."""
    if value and not _ID.fullmatch(value):
        raise ValueError("is no checkpoint: write the id that vmgr checkpoint has printed")
    return value


def key_of(name: str) -> str:
    """Return the job attempt's key that the id of a checkpoint is of."""
    return re.sub(r"-\d+$", "", name, flags=re.ASCII)
