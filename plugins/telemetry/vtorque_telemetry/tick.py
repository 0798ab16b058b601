"""The tick: measured values, sent from the sampler's root part to its unprivileged part.

A tick is a message on a SOCK_SEQPACKET socket (unix(7)), so it arrives completely or not at all.
The message passes descriptors: a memfd with the pickled :class:`Tick`, then the files in ``files``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vtorque_telemetry.metrics import Values

MAX_FILES = 200  # files in one message; the kernel's limit is 253 (SCM_MAX_FD)
Name = tuple[str, int | None]
"""Name of a file in a tick: the job key, and None for series.jsonl or the index of a guest.

The file of a guest is a socket, connected to the port on which the guest's programs write metrics.
"""


@dataclass(frozen=True, slots=True)
class GuestFigures:
    """The measured values of one guest; ``rank`` is its rank in the whole job."""

    rank: int
    values: Values


@dataclass(frozen=True, slots=True)
class JobFigures:
    """The measured values of one job on this node. ``guests`` maps guest indexes to values.

    ``labels`` are job, user and node. ``phases`` are names and start times (Unix); the last phase
    is still active.
    """

    labels: Mapping[str, str]
    phases: tuple[tuple[str, float], ...]
    guests: Mapping[int, GuestFigures]


@dataclass(frozen=True, slots=True)
class Tick:
    """All measured values of one moment by job key, and the names of the files sent with the tick.

    ``last`` is the key of an ending job, or empty. With ``last``, a pipe is sent after the files.
    The receiver closes the pipe to confirm the job's last sample.
    """

    at: float
    jobs: Mapping[str, JobFigures]
    files: tuple[Name, ...] = ()
    last: str = ""


def send(to: socket.socket, tick: Tick, files: Sequence[int]) -> None:
    """Send a tick with open files. Raises OSError (BlockingIOError if the socket is full)."""
    with open(os.memfd_create("tick"), "wb") as told:  # noqa: PTH123 - a descriptor
        pickle.dump(tick, told)
        told.flush()
        socket.send_fds(to, [b"t"], [told.fileno(), *files])


def receive(source: socket.socket) -> tuple[Tick, list[int]] | None:
    """Wait for the next tick; return the tick and its open files, or None at the end of input.

    Raises OSError.
    """
    said, descriptors, _, _ = socket.recv_fds(source, 1, MAX_FILES + 2)
    if not said:
        return None
    with contextlib.ExitStack() as undo:
        for descriptor in descriptors[1:]:
            undo.callback(os.close, descriptor)
        with open(descriptors[0], "rb") as told:  # noqa: PTH123
            told.seek(0)
            tick: Tick = pickle.load(told)  # noqa: S301 - written by root
        undo.pop_all()
    return tick, descriptors[1:]
