"""The unprivileged sink process, which runs all sinks except ``file``.

Root's follower starts this process for the first log line, and sends it logs as descriptors
(:mod:`vtorque_joblog.unprivileged_sinks`). The process has no other access to root's files. It
starts as root and opens the sinks. Before it reads a log, it drops all privileges and changes to a
uid without account or files. Usage: ``python -I -m vtorque_joblog.sinks_process CONFIG
NAME...``.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vtorque_core.api import HostFault
from vtorque_core.api.children import wait_readable
from vtorque_core.live import extensions
from vtorque_core.live.node_process import switch_user
from vtorque_joblog.api import GROUP
from vtorque_joblog.outlets import JobLog, SinkThread
from vtorque_joblog.plugin import Settings
from vtorque_joblog.sinks import entry_filter, open_sink
from vtorque_joblog.unprivileged_sinks import MAX_WORD, RECORD

_OPENING = 10.0  # seconds in which all sinks must be open
_AGAIN = 60.0  # seconds until another process tries to open failed sinks
_END = 0.4  # seconds to close the sinks, less than the follower's limit
_PR_CAPBSET_DROP = 24  # prctl(2)


class _File:
    """A descriptor, which is closed when this object is deleted."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@dataclass(frozen=True)
class ReceivedLog(JobLog):
    """A log that root sent; it ends with a complete line, at ``end``."""

    file: _File
    end: int

    @property
    def size(self) -> int:
        """The number of bytes to deliver."""
        return self.end

    def open(self) -> int:
        """Return a copy of the log's descriptor, which the caller closes. Raises OSError."""
        return os.dup(self.file.number)


class RemoteOffsets:
    """The offsets up to which one sink has received the logs.

    Each new offset is reported to root, which saves it
    (:class:`vtorque_joblog.saved_offsets.SavedOffsets`).
    """

    def __init__(self, answers: int, sink: int) -> None:
        self._answers = answers
        self._sink = sink
        self._at: dict[str, tuple[int, int]] = {}  # the log's number, offset

    def begin(self, name: str, number: int, offset: int) -> None:
        """Use root's ``offset`` for a log that this process has not received before.

        For other logs, this process has its own offset, which is newer and therefore stays.
        ``number`` is the log's number in :func:`answer`.
        """
        self._at.setdefault(name, (number, offset))

    def offset_of(self, name: str) -> int:
        """Return the offset of the first byte that was not delivered."""
        return self._at[name][1]

    def mark(self, name: str, offset: int) -> None:
        """Report to root that all bytes before the offset were delivered."""
        number, _ = self._at[name]
        self._at[name] = number, offset
        answer(self._answers, self._sink, number, offset)


def answer(answers: int, sink: int, number: int, offset: int) -> None:
    """Report to root the offset up to which a sink has delivered a log.

    If root's process has ended, exit, because a new process will deliver further lines.
    """
    try:
        os.write(answers, RECORD.pack(sink, number, offset))
    except OSError:
        os._exit(0)


def receive_logs(
    root: socket.socket, until: float
) -> Iterator[tuple[ReceivedLog, int, Sequence[int]]]:
    """Yield each log that root sends, the log's number, and the start offset for each sink.

    The number identifies the log in :func:`answer`.
    Ends at the monotonic time ``until``, or at the end of input. Raises HostFault if the limit of
    open files is reached.
    """
    while (lasts := until - time.monotonic()) > 0:
        if not wait_readable([root.fileno()], lasts):
            return
        data, files, _, _ = socket.recv_fds(root, MAX_WORD, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        if not files:
            raise HostFault("too many logs: the limit of open files (RLIMIT_NOFILE) is reached")
        word = json.loads(data)
        log = ReceivedLog(word["uid"], word["key"], Path(), _File(files[0]), word["end"])
        yield log, word["number"], word["told"]


def main() -> None:
    """Open the sinks, drop privileges, and deliver logs until the end of input."""
    logging.basicConfig(level="INFO", format="%(message)s")
    config, *names = sys.argv[1:]
    root, answers = (
        socket.socket(fileno=_claim_descriptor(0, os.O_RDONLY)),
        _claim_descriptor(1, os.O_WRONLY),
    )
    _forbid_rights()
    site, found = extensions.load(Path(config), GROUP)
    pool = ThreadPoolExecutor(len(names))  # one thread per sink, because a sink may hang
    handlers = [pool.submit(open_sink, name, site, found) for name in names]
    wait(handlers, _OPENING)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    switch_user(site[Settings].uid)
    all_open = all(each.done() and each.exception() is None for each in handlers)
    until = math.inf if all_open else time.monotonic() + _AGAIN
    wants = entry_filter(site[Settings], site.log.level)
    deputies = [RemoteOffsets(answers, sink) for sink in range(len(names))]
    outlets = [
        SinkThread(name, partial(_result, handler), deputy, wants=wants)
        for name, handler, deputy in zip(names, handlers, deputies, strict=True)
    ]
    for count, (log, number, told) in enumerate(receive_logs(root, until), 1):
        for outlet, deputy, offset in zip(outlets, deputies, told, strict=True):
            deputy.begin(log.name, number, offset)
            outlet.give(log)
        answer(answers, len(names), 0, count)
    end = time.monotonic() + _END
    for outlet in outlets:
        outlet.close(end)
    os._exit(0)  # a sink may hang


def _claim_descriptor(number: int, flags: int) -> int:
    """Return a close-on-exec copy of descriptor ``number``; redirect ``number`` to /dev/null."""
    found = os.dup(number)
    null = os.open(os.devnull, flags | os.O_CLOEXEC)
    os.dup2(null, number)
    os.close(null)
    return found


def _result(handler: Future[logging.Handler]) -> logging.Handler:
    """Return the handler that a sink's function opened as root.

    Raises the function's exception, or HostFault if the function hangs.
    """
    if not handler.done():
        raise HostFault(f"the sink was not ready within {_OPENING:g} s")
    return handler.result()


def _forbid_rights() -> None:
    """Drop all capabilities from the bounding set of this and later threads (capabilities(7))."""
    for capability in range(64):
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


if __name__ == "__main__":
    main()
