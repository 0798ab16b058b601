"""Make the directory of an experiment: its file, its scripts, what it runs with, all its points."""

from __future__ import annotations

import errno
import json
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Refusal, Refused, printable
from vtorque_experiment import book, definition, matrix
from vtorque_experiment.place import Place

MAX_SCRIPT = 4 << 20  # bytes


def create(
    file: Path, place: Place, versions: Callable[[], Mapping[str, Any]],
    repetitions: int | None = None,
) -> definition.Definition:  # fmt: skip
    """Make it; ``repetitions`` win over the file's.

    Raises Refused (a bad file, a directory with something in it), HostFault (the disk).

    The book comes last: a directory without one has run nothing, and is made anew.
    """
    found = definition.read(file, repetitions)
    cells = matrix.cells(found, printable(str(file)))
    sources = {name: source(file.parent / name) for name in found.scripts}
    if place.database.exists():
        raise Refused(
            Refusal(
                "has results already",
                key="directory",
                value=str(place.top),
                fix="vmgr experiment resume goes on with it; --dir DIR takes another one",
            )
        )
    if place.top.is_dir() and any(place.top.iterdir()) and not place.definition.exists():
        raise Refused(
            Refusal("is not empty", key="directory", value=str(place.top), fix="take another one")
        )
    seed = found.seed if found.seed is not None else secrets.randbits(32)
    try:
        place.scripts.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place.definition)
        for number, content in enumerate(sources.values()):
            path = place.scripts / f"{number}-{Path(found.scripts[number]).name}"
            path.write_bytes(content)
            path.chmod(0o755)
        place.versions.write_text(json.dumps(versions(), indent=2) + "\n")
        about = {
            "id": secrets.token_hex(3),
            "title": found.title,
            "seed": str(seed),
            "root": str(file.parent.absolute()),
            "made": str(time.time()),
        }
        points = matrix.ordered(len(cells), found.repetitions, seed)
        book.make(place.database, about, cells, points)
    except OSError as error:
        raise disk(error) from None
    return found


def script_of(place: Place, found: definition.Definition, cell: matrix.Cell) -> Path:
    """Return the copy of the script that a combination runs."""
    name = str(cell.get("script", found.scripts[0]))
    return place.scripts / f"{found.scripts.index(name)}-{Path(name).name}"


def disk(error: OSError) -> HostFault:
    """Return what to say of a file that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return HostFault(
        f"{printable(str(error.filename or 'the results'))}: {error.strerror}; nothing is lost: "
        f"{'make room' if full else 'see to it'}, then vmgr experiment resume"
    )


def source(path: Path) -> bytes:
    """Return a job script's text. Raises Refused."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Refused(
            Refusal(f"cannot be read: {error.strerror}", key="script", value=str(path))
        ) from None
    if len(content) > MAX_SCRIPT:
        raise Refused(
            Refusal("is too long", key="script", value=str(path), limit=f"{MAX_SCRIPT >> 20} MiB")
        )
    return content
