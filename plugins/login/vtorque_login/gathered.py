"""Collect the records of running jobs from their nodes, for commands that only read records.

Records may come from code in a guest, so sizes and names are limited. Readers treat the content as
untrusted, like all kept records.
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
"""Commands that read all nodes' records, with the options that prevent this."""

_MOST_SENT = 16 << 20  # packed bytes per node; excess files are left out, samples first
_MOST = 64 << 20  # bytes of all nodes, unpacked
_FILE = re.compile(r"[a-z]{1,20}\.jsonl?", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.\d{1,9}", re.ASCII)
_PLACES: list[Place] = []


@dataclasses.dataclass(frozen=True)
class FetchedRecord(Place):
    """Files that one node has sent. They stay in memory, so a killed command leaves no files."""

    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def changed(self) -> float:
        """The current time in Unix seconds: records of a running job are always new."""
        return time.time()

    def open(self, name: str) -> int:
        """Return a descriptor of a file in memory (memfd) with the content of the file ``name``."""
        content = self.read(name)
        with os.fdopen(os.memfd_create("kept"), "wb") as file:
            file.write(content)
            file.seek(0)
            return os.dup(file.fileno())

    def read(self, name: str, limit: int = _MOST) -> bytes:
        """Return at most ``limit`` bytes of a file. Raise OSError if the node did not send it."""
        try:
            return self.files[name][:limit]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None


def reads_all_nodes(command: str, options: Collection[str]) -> bool:
    """Return whether the command reads the records of all nodes of a job."""
    return command in _OF_ONE and not _OF_ONE[command] & set(options)


def pack_files(place: Place) -> dict[str, str]:
    """Return the files of a job's kept record by name, zlib-compressed in base64."""
    found, left = {}, _MOST_SENT
    names = [each.name for each in place.directory.iterdir() if _FILE.fullmatch(each.name)]
    for name in sorted(names, key=lambda name: (name != JOB, name != LOG, name)):
        text = base64.b64encode(zlib.compress(place.read(name, _MOST))).decode()
        if len(text) <= left:
            found[name] = text
            left -= len(text)
    return found


def fetch_records(nodes: Sequence[tuple[str, str]], config: Path, wait: float) -> None:
    """As the calling user, get records of jobs from nodes. :func:`places` then yields the records.

    Prints the names of nodes that do not answer. ``nodes`` are pairs of a job id and a node;
    ``wait`` is ``[plugin.login] answer_timeout`` in seconds.
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
            sys.stderr.write(f"vmgr: incomplete, without {each}\n")


def places() -> Iterator[Place]:
    """Yield the kept records that :func:`fetch_records` has copied into this process's memory."""
    yield from _PLACES


def _nodes(place: Place) -> list[str]:
    found = place.facts().get("nodes")
    return [node for node in found if isinstance(node, str)] if isinstance(found, list) else []


class _Unpacking:
    """Unpacks the files of several nodes, with one size limit for all nodes together."""

    def __init__(self) -> None:
        self._left = _MOST
        self._lock = threading.Lock()

    def place(self, said: Any) -> Place:
        """Return the record in ``said``, a node's answer.

        Raise ValueError, TypeError or KeyError if the answer is invalid.
        """
        key = str(said["key"])
        if not _KEY.fullmatch(key):
            raise ValueError(key)
        with self._lock:
            files = {name: self._file(name, text) for name, text in dict(said["files"]).items()}
        return FetchedRecord(Paths(), os.getuid(), key, files)

    def _file(self, name: str, text: str) -> bytes:
        if not _FILE.fullmatch(name):
            raise ValueError(name)
        try:
            content = zlib.decompressobj().decompress(base64.b64decode(text), self._left + 1)
        except zlib.error as error:
            raise ValueError(name) from error
        if len(content) > self._left:
            raise ValueError(f"the files are larger than {_MOST} bytes")
        self._left -= len(content)
        return content
