"""What the nodes of running jobs have kept of them, brought here: for commands that read no more.

What comes may be a guest's word: it is bounded and has plain names, and who reads it believes
nothing of it, as of all that is kept.
"""

from __future__ import annotations

import base64
import dataclasses
import errno
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Paths
from vtorque_core.api.kept_records import JOB, LOG, Place
from vtorque_login import state

_OF_ONE = {"report": frozenset[str](), "logs": frozenset(("follow", "console", "cloud_init"))}
"""Commands that read what all nodes have kept, but not with these options."""

_MOST_SENT = 16 << 20  # bytes of a node, packed: what is too much is left out, samples first
_MOST = 64 << 20  # bytes of all nodes, unpacked
_FILE = re.compile(r"[a-z]{1,20}\.jsonl?", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.\d{1,9}", re.ASCII)
_PLACES: list[Place] = []


@dataclasses.dataclass(frozen=True)
class Brought(Place):
    """What one node has sent: files by name, in memory only, whenever the command is killed."""

    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def changed(self) -> float:
        """Now, in Unix seconds: the job is running."""
        return time.time()

    def open(self, name: str) -> int:
        """Return a descriptor of a file without a name. Raises OSError: it was not sent."""
        content = self.read(name)
        with os.fdopen(os.memfd_create("kept"), "wb") as file:
            file.write(content)
            file.seek(0)
            return os.dup(file.fileno())

    def read(self, name: str, limit: int = _MOST) -> bytes:
        """Return at most ``limit`` bytes of a file. Raises OSError: it was not sent."""
        try:
            return self.files[name][:limit]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None


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
    """Ask nodes for their kept records, so that :func:`places` returns them. As the calling user.

    Prints the nodes that do not answer.

    Args:
        nodes: pairs of a job id and a node.
        config: the site config.
        wait: as for :func:`state.answer`.
    """
    unpacking = _Unpacking()

    def ask(job_id: str, node: str) -> Place | HostFault:
        try:
            return state.answer(
                unpacking.place, job_id, node, config, wait, "--files", most=2 * _MOST_SENT
            )
        except HostFault as error:
            return error

    with ThreadPoolExecutor(state.AT_ONCE) as threads:
        asked = [threads.submit(ask, *each) for each in nodes]
        found = [each.result() for each in asked]
    _PLACES[:] = [each for each in found if isinstance(each, Place)]
    with_guests = {node for place in _PLACES for node in _nodes(place)}
    for (_, node), each in zip(nodes, found, strict=True):
        if isinstance(each, HostFault) and (node in with_guests or not with_guests):
            sys.stderr.write(f"vmgr: without {each}\n")


def places() -> Iterator[Place]:
    """Yield what has been brought, which is there as long as this process."""
    yield from _PLACES


def _nodes(place: Place) -> list[str]:
    """Return the nodes with guests that one of them names, whatever else stands there."""
    found = place.facts().get("nodes")
    return [node for node in found if isinstance(node, str)] if isinstance(found, list) else []


class _Unpacking:
    """What several nodes have sent, unpacked: all of them together have a bound."""

    def __init__(self) -> None:
        self._left = _MOST
        self._lock = threading.Lock()

    def place(self, said: Any) -> Place:
        """Return what a node has sent. Raises ValueError, TypeError, KeyError."""
        key = str(said["key"])
        if not _KEY.fullmatch(key):
            raise ValueError(key)
        with self._lock:
            files = {name: self._file(name, text) for name, text in dict(said["files"]).items()}
        return Brought(Paths(), os.getuid(), key, files)

    def _file(self, name: str, text: str) -> bytes:
        if not _FILE.fullmatch(name):
            raise ValueError(name)
        try:
            content = zlib.decompressobj().decompress(base64.b64decode(text), self._left + 1)
        except zlib.error as error:
            raise ValueError(name) from error
        if len(content) > self._left:
            raise ValueError(f"more than {_MOST} bytes")
        self._left -= len(content)
        return content
