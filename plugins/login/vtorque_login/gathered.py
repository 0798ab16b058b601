"""What the nodes of running jobs have kept of them, brought here: for commands that read no more.

What comes may be a guest's word: it is bounded and has plain names, and who reads it believes
nothing of it, as of all that is kept.
"""

from __future__ import annotations

import base64
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Paths
from vtorque_core.api.kept_records import JOB, LOG, Place
from vtorque_login import state

_OF_ONE = {"report": frozenset[str](), "logs": frozenset(("follow", "console", "cloud_init"))}
"""Commands that read what all nodes have kept, but not with these options."""

_MOST_SENT = 16 << 20  # bytes of a node, packed: what is too much is left out, samples first
_MOST = 64 << 20  # bytes of a node, unpacked
_FILE = re.compile(r"[a-z]{1,20}\.jsonl?", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.\d{1,9}", re.ASCII)
_PLACES: list[Place] = []


def is_of_all_nodes(command: str, options: Collection[str]) -> bool:
    """Return whether the command reads what all nodes of a job have kept."""
    return command in _OF_ONE and not _OF_ONE[command] & set(options)


def packed(place: Place) -> dict[str, str]:
    """Return a job's files on this node, by name: zlib's, in base64. Raises OSError."""
    found, left = {}, _MOST_SENT
    names = [each.name for each in place.directory.iterdir() if _FILE.fullmatch(each.name)]
    for name in sorted(names, key=lambda name: (name != JOB, name != LOG, name)):
        text = base64.b64encode(zlib.compress(place.read(name, _MOST))).decode()
        if len(text) <= left:
            found[name] = text
            left -= len(text)
    return found


def bring(nodes: Sequence[tuple[str, str]], config: Path, wait: float) -> None:
    """Have :func:`places` know what these have kept, pairs of a job's id and a node.

    As the calling user, who is told of nodes that do not answer. ``wait``: as of
    :func:`state.answer`.
    """

    def ask(number: int, job_id: str, node: str) -> Place | HostFault:
        top = Path(_scratch().name, str(number))
        try:
            read = partial(_unpack, top)
            return state.answer(read, job_id, node, config, wait, "--files", most=2 * _MOST_SENT)
        except HostFault as error:
            return error

    with ThreadPoolExecutor(state.AT_ONCE) as threads:
        asked = [threads.submit(ask, n, *each) for n, each in enumerate(nodes)]
        found = [each.result() for each in asked]
    _PLACES[:] = [each for each in found if isinstance(each, Place)]
    with_guests = {str(node) for place in _PLACES for node in place.facts().get("nodes", ())}
    for (_, node), each in zip(nodes, found, strict=True):
        if isinstance(each, HostFault) and (node in with_guests or not with_guests):
            sys.stderr.write(f"vmgr: without {each}\n")


def places() -> Iterator[Place]:
    """Yield what has been brought, which is there as long as this process."""
    yield from _PLACES


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vtorque-")


def _unpack(top: Path, said: Any) -> Place:
    """Write what a node has sent below a directory. Raises ValueError, TypeError, KeyError."""
    key, left = str(said["key"]), _MOST
    if not _KEY.fullmatch(key):
        raise ValueError(key)
    place = Place(Paths(state=top), os.getuid(), key)
    place.directory.mkdir(parents=True)
    for name, text in dict(said["files"]).items():
        if not _FILE.fullmatch(name):
            raise ValueError(name)
        try:
            content = zlib.decompressobj().decompress(base64.b64decode(text), left + 1)
        except zlib.error as error:
            raise ValueError(name) from error
        left -= len(content)
        if left < 0:
            raise ValueError(f"more than {_MOST} bytes")
        (place.directory / name).write_bytes(content)
    return place
