"""Doubles for root's checks of file owners: a recorded node simulates a node without root.

In a user namespace, host root appears as an unknown user (user_namespaces(7)). The doubles treat
files of host root and of the current user as root's. Other owners and write permissions are
reported unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vtorque_core.base import safefs, trust

Double = tuple[object, str, Callable[..., Any]]


def doubles() -> Iterator[Double]:
    """Yield object, attribute and replacement of each double; for root, yield nothing."""
    if os.geteuid() == 0:
        return
    strangers = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    ours = (os.geteuid(), strangers)
    of_walk, of_path = safefs._check, trust._check

    def check_status(status: os.stat_result, path: str, part: str, place: int) -> None:
        if status.st_uid in ours:
            status = os.stat_result((*status[:4], 0, *status[5:10]))
        of_walk(status, path, part, place)

    def check_path(here: Path, uid: int) -> bool:
        try:
            owner = here.lstat().st_uid
        except OSError:
            owner = uid
        return of_path(here, owner if owner in ours else uid)

    yield safefs, "_check", check_status
    yield trust, "_check", check_path
    for name in ("chown", "fchown", "lchown"):
        yield os, name, lambda *_, **__: None
