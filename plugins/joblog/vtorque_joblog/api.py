"""Public API for a distribution that provides a sink for job logs.

A sink is an entry point of the group :data:`GROUP`, ``acme = "acme.log:open_sink"``: a function
that takes the site config and returns a ``logging.Handler``. Enable it in ``[plugin.joblog]
sinks``.

Life cycle:

1. The sink process calls the function as root, in a thread. The function must open what needs
   root (a secret, a socket) within ten seconds. If the function fails or takes longer, a new sink
   process calls the function again, as root, a minute later.
2. The process drops all privileges and runs as ``[plugin.joblog] uid``; it cannot write files.
   Another thread, one per sink, calls the handler's methods.
3. At the process's end, ``close`` has less than half a second.

The handler gets one record at a time and may block without delaying other handlers. If a handler
raises OSError or HostFault, it gets the record again later. After any other exception, the record
is skipped. If the process was killed, the handler may get the last records again. Records have the
attributes ``job``, ``node``, ``guest``, ``phase``, ``plugin``, ``uid`` (of the job's owner) and
``entry``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

GROUP = "vtorque1.joblog"


def entry_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the sanitized entry of ``log.jsonl`` from which ``record`` was made.

    Keys: ``t`` (Unix seconds), ``level``, ``logger``, ``plugin``, ``phase``, ``guest`` (index on
    this node, or None), ``node``, ``job``, ``message``, and optionally ``detail``, a list of lines.
    """
    entry: Mapping[str, Any] = record.__dict__["entry"]
    return entry


def one_line(entry: Mapping[str, Any]) -> str:
    """Format an entry as one line, with its details but without time and job."""
    guest = entry.get("guest")
    place = f"{entry.get('phase') or '-'}{'' if guest is None else f' g{guest}'}"
    text = f"{entry.get('level')} [{place}] {entry.get('logger')}: {entry.get('message')}"
    detail = entry.get("detail") or []
    return " | ".join([text, *map(str, detail)])
