"""The table of ``vmgr images list``, made without hashing files or starting processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vtorque_core.api import Paths, VtorqueError, tables
from vtorque_core.live.images import BrokenImage, ListedImage, Site, store
from vtorque_images.allowed import default_image
from vtorque_images.common import age, size, users_of

_COLUMNS = ("NAME", "TYPE", "DISTRO", "ARCH", "SIZE", "AGE", "USED BY", "VERIFIED")
DESCRIPTION = "description"  # label: a description for users
_MOST_JOBS = 3


def jobs_by_version(paths: Paths) -> store.Uses | None:
    """Return the jobs of this node by image version; None if the journals are unreadable.

    ``vtorque doctor`` and ``reap`` report damaged journals.
    """
    if not os.path.lexists(paths.journal):
        return {} if os.access(paths.state, os.X_OK) or not paths.state.exists() else None
    if not os.access(paths.journal, os.R_OK | os.X_OK):
        return None
    try:
        return store.image_uses(paths)
    except VtorqueError:
        return None


def users(known: store.Uses | None, home: Path) -> tuple[str, ...] | None:
    """Return the jobs that use any version of the image in the directory ``home``.

    Returns None if unknown.
    """
    if not known:
        return None if known is None else ()
    return users_of(home, known)


def row(item: ListedImage | BrokenImage, site: Site, known: store.Uses | None) -> dict[str, Any]:
    """Return one image in the format of ``vmgr images list --json``."""
    if isinstance(item, BrokenImage):
        return {"name": item.name, "broken": item.reason}
    sidecar, built = item.sidecar, item.sidecar.built
    used_by = users(known, site.images.pool / item.name)
    return {
        "name": item.name,
        "guest_type": built.guest_type,
        "distro": built.distro,
        "arch": built.arch,
        "min_ram_mib": built.min_ram_mib,
        "sha256": sidecar.sha256,
        "version": sidecar.version,
        "size": item.size,
        "on_disk": item.on_disk,
        "builder": sidecar.builder,
        "created": sidecar.created,
        "verified": sidecar.verified,
        "labels": dict(built.labels),
        "used_by": None if used_by is None else list(used_by),
        "default": default_image(site) == item.name,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table, and broken images with the reason."""
    now = datetime.now(UTC)
    usable = [each for each in rows if "broken" not in each]
    told = any(DESCRIPTION in each["labels"] for each in usable)
    columns = (*_COLUMNS, "DESCRIPTION") if told else _COLUMNS
    good = [_cells(each, now)[: len(columns)] for each in usable]
    broken = [f"{each['name']}  broken: {each['broken']}" for each in rows if "broken" in each]
    tables.show(columns, good, broken, right=("SIZE", "AGE"))


def _cells(each: dict[str, Any], now: datetime) -> tuple[str, ...]:
    used = each["used_by"]
    jobs = "?" if used is None else ",".join(used[:_MOST_JOBS]) or "-"
    if used is not None and len(used) > _MOST_JOBS:
        jobs += f",+{len(used) - _MOST_JOBS}"
    return (
        each["name"] + ("*" if each["default"] else ""),
        each["guest_type"],
        each["distro"],
        each["arch"],
        size(each["on_disk"]),
        age(each["created"], now),
        jobs,
        f"{age(each['verified'], now)} ago",
        each["labels"].get(DESCRIPTION, "-"),
    )
