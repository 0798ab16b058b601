"""What root's half of the sampler sends to the other: figures, and what is open for it.

A message is one byte on a SOCK_SEQPACKET socket (unix(7)), so it arrives whole or not at all. With
it come descriptors: that of a memfd with the pickled :class:`Tick`, then those of its ``files``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vtorque_telemetry.metrics import Values

MAX_FILES = 200  # of one message; the kernel's limit is 253 (SCM_MAX_FD)
Name = tuple[str, int | None]
"""A job's key and a guest's index: its port for lines; None: the job's series.jsonl."""


@dataclass(frozen=True, slots=True)
class GuestFigures:
    """What was measured of one guest; ``rank`` in the whole job."""

    rank: int
    values: Values


@dataclass(frozen=True, slots=True)
class JobFigures:
    """One job on this node; ``labels``: job, user, node; ``guests`` by index.

    ``phases``: name and Unix time, the last one is not over.
    """

    labels: Mapping[str, str]
    phases: tuple[tuple[str, float], ...]
    guests: Mapping[int, GuestFigures]


@dataclass(frozen=True, slots=True)
class Tick:
    """All of one moment (Unix seconds): the jobs that there are by their keys, and new files.

    ``last``: the key of a job that ends; a pipe may follow its files, whose end somebody awaits.
    """

    at: float
    jobs: Mapping[str, JobFigures]
    files: tuple[Name, ...] = ()
    last: str = ""


def send(to: socket.socket, tick: Tick, files: Sequence[int]) -> None:
    """Send it with its files. Raises OSError; BlockingIOError if too many wait there already."""
    with open(os.memfd_create("tick"), "wb") as told:  # noqa: PTH123 - a descriptor
        pickle.dump(tick, told)
        told.flush()
        socket.send_fds(to, [b"t"], [told.fileno(), *files])


def receive(source: socket.socket) -> tuple[Tick, list[int]] | None:
    """Wait for the next one; return it with its files, None at the end. Raises OSError."""
    said, descriptors, _, _ = socket.recv_fds(source, 1, MAX_FILES + 2)
    if not said:
        return None
    with contextlib.ExitStack() as undo:
        for descriptor in descriptors[1:]:
            undo.callback(os.close, descriptor)
        with open(descriptors[0], "rb") as told:  # noqa: PTH123
            told.seek(0)
            tick: Tick = pickle.load(told)  # noqa: S301 - root's word to one that has less
        undo.pop_all()
    return tick, descriptors[1:]
