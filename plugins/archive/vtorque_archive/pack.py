"""Name and content of an archive: a node's records of one job attempt.

An archive is a zip file (PKWARE's APPNOTE) with the records at the top level.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Sequence

from vtorque_core.api.kept_records import JOB, LOG

MAX_FILES = 4096
MAX_BYTES = 128 << 20  # of all files together, uncompressed
LEFT_OUT = "left-out.txt"
_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*\.\d+)@[A-Za-z0-9._-]+\.zip", re.ASCII)
_FILE = re.compile(r"[a-z][a-z0-9-]{0,60}\.(json|jsonl|log)", re.ASCII)
_SMALL = 1 << 10  # bytes of overhead for a file, and for the list of omitted files


UNFINISHED = ".vtorque-unfinished-"
"""Prefix of temporary files."""


def note_of(key: str, node: str) -> str:
    """Return the name of the file that holds a script's exit code until the job is archived."""
    return f"{UNFINISHED}{name_of(key, node)}"


def name_of(key: str, node: str) -> str:
    """Return an archive's file name from a job key (job id and attempt) and a node name."""
    return f"{key}@{re.sub(r'[^A-Za-z0-9._-]', '_', node)[:100] or 'node'}.zip"


def key_of(name: str) -> str:
    """Return the job key in an archive's file name, or "" if the file is no archive."""
    match = _NAME.fullmatch(name)
    return match[1] if match else ""


def is_kept(name: str) -> bool:
    """Return whether the archive includes files with this name."""
    return _FILE.fullmatch(name) is not None


def order(name: str) -> tuple[int, str]:
    """Return a sort key for files by importance: ``job.json``, log, consoles, samples."""
    first = [JOB, LOG]
    large = name.endswith(".jsonl")
    return (first.index(name) if name in first else 2 + large, name)


def pack_files(files: Sequence[tuple[str, bytes]], limit: int) -> bytes:
    """Return an archive of at most ``limit`` bytes, with a list of the files that do not fit."""
    buffer, left = io.BytesIO(), []
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        directory = _SMALL
        for name, content in files:
            directory += _SMALL
            room = limit - buffer.tell() - directory
            if len(content) > room and len(zlib.compress(content)) > room:
                left.append(name)
            else:
                archive.writestr(name, content)
        if left:
            some = f"{left[:20]} of {len(left)} files"
            archive.writestr(LEFT_OUT, f"Removed because of the site's size limit: {some}\n")
    return buffer.getvalue()
