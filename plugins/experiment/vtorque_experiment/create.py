"""Create the directory of an experiment: its file, scripts, software versions and database."""

from __future__ import annotations

import errno
import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Refused, printable
from vtorque_experiment import book, definition, files, matrix
from vtorque_experiment.place import ResultsDirectory
from vtorque_experiment.plan import MAX_SCRIPT, ExperimentPlan


def create(
    file: Path, place: ResultsDirectory, versions: Callable[[], Mapping[str, Any]],
    repetitions: int | None = None,
) -> ExperimentPlan:  # fmt: skip
    """Create the results directory of an experiment, and return the experiment's plan.

    ``versions`` returns the software versions to save. ``repetitions`` overrides the file's value.
    The database is written last. A later call overwrites the files of an interrupted call.

    Raises:
        Refused: the file is invalid, or the directory is not empty.
        HostFault: the disk fails.
    """
    found = definition.read(file, repetitions)
    cells = matrix.cells(found, printable(str(file)))
    sources = {name: source(file.parent / name) for name in found.scripts}
    if place.database.exists():
        raise Refused(
            "already contains results",
            key="directory",
            value=str(place.top),
            fix="continue it with vmgr experiment resume, or use another directory (--dir DIR)",
        )
    if place.top.is_dir() and any(place.top.iterdir()) and not place.definition.exists():
        raise Refused(
            "is not empty", key="directory", value=str(place.top), fix="use another directory"
        )
    seed = found.seed if found.seed is not None else secrets.randbits(32)
    root = str(file.parent.absolute())
    plan = ExperimentPlan(secrets.token_hex(3), root, seed, found.repetitions, found, sources)
    try:
        place.top.mkdir(parents=True, exist_ok=True)
        with files.directory(place.top, place.scripts.name, make=True):
            pass
        place.write(place.definition, file.read_bytes())
        for name, content in sources.items():
            place.write(plan.copy_path(place, name), content, 0o755)
        place.write(place.versions, json.dumps(versions(), indent=2).encode() + b"\n")
        about = {
            "id": plan.id,
            "title": found.title,
            "seed": str(seed),
            "root": root,
            "made": str(time.time()),
        }
        book.make(place.database, about, cells, plan.points.values())
    except OSError as error:
        raise disk(error) from None
    return plan


def disk(error: OSError) -> HostFault:
    """Return the error for a file that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return HostFault(
        f"{printable(str(error.filename or 'the results'))}: {error.strerror}; nothing is lost: "
        f"{'free disk space' if full else 'correct this'}, then run vmgr experiment resume"
    )


def source(path: Path) -> bytes:
    """Return the content of a job script. Raises Refused."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror}", key="script", value=str(path)) from None
    if len(content) > MAX_SCRIPT:
        raise Refused(
            "is too large", key="script", value=str(path), limit=f"{MAX_SCRIPT >> 20} MiB"
        )
    return content
