"""The table of ``vmgr images list``: nothing is hashed and no process is started for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vtorque_core.api_options import IMG
from vtorque_core.cli.images_common import age, size
from vtorque_core.image_pool import Broken, Listed
from vtorque_core.limits import Limits
from vtorque_core.names import Paths

if TYPE_CHECKING:
    from vtorque_core.config import Site
    from vtorque_core.image_store import Uses

_COLUMNS = ("NAME", "TYPE", "DISTRO", "ARCH", "SIZE", "AGE", "USED BY", "VERIFIED")
_MOST_RICH = 200  # rows; rich needs 0.5 ms of CPU time for each
_MOST_JOBS = 3


def uses(paths: Paths) -> Uses | None:
    """Return which jobs of this node use which version; None: the journals are root's.

    Also None if a journal cannot be read: ``vtorque doctor`` and ``reap`` name it.
    """
    if not os.path.lexists(paths.journal):
        return {} if os.access(paths.state, os.X_OK) or not paths.state.exists() else None
    if not os.access(paths.journal, os.R_OK | os.X_OK):
        return None
    from vtorque_core.image_store import in_use  # noqa: PLC0415
    from vtorque_core.records import JournalError  # noqa: PLC0415

    try:
        return in_use(paths)
    except JournalError:
        return None


def users(known: Uses | None, home: str) -> tuple[str, ...] | None:
    """Return the jobs that use any version below ``home/``."""
    if known is None:
        return None
    jobs = {job: None for path, ids in known.items() if path.startswith(home) for job in ids}
    return tuple(jobs)


def row(item: Listed | Broken, site: Site, known: Uses | None) -> dict[str, Any]:
    """Return one image as ``--json`` prints it."""
    if isinstance(item, Broken):
        return {"name": item.name, "broken": item.reason}
    sidecar, built = item.sidecar, item.sidecar.built
    used_by = users(known, f"{site.images.pool}/{item.name}/") if known else known
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
        "default": site.options.get(IMG.key, Limits()).default == item.name,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table: with colours on a terminal, plain elsewhere and if it is very long."""
    now = datetime.now(UTC)
    good = [_cells(each, now) for each in rows if "broken" not in each]
    broken = [(each["name"], each["broken"]) for each in rows if "broken" in each]
    if os.isatty(1) and len(rows) <= _MOST_RICH:
        _show_rich(good, broken)
        return
    table = [_COLUMNS, *good] if good else []
    widths = [max(len(cells[n]) for cells in table) for n in range(len(_COLUMNS))] if table else []
    line = "  ".join(f"{{:{width}}}" for width in widths).format
    lines = [line(*cells).rstrip() for cells in table]
    lines += [f"{name}  broken: {reason}" for name, reason in broken]
    sys.stdout.write("".join(f"{text}\n" for text in lines))


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
    )


def _show_rich(good: Sequence[tuple[str, ...]], broken: Sequence[tuple[str, str]]) -> None:
    from rich import box  # noqa: PLC0415 - 60 ms, for a terminal only
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in ("SIZE", "AGE") else "left")
    for cells in good:
        table.add_row(Text(cells[0], style="bold"), *(Text(cell) for cell in cells[1:]))
    if good:
        console.print(table)
    for name, reason in broken:
        console.print(Text(f"{name}  broken: {reason}", style="red"), soft_wrap=True)
