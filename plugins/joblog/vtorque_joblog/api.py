"""Public: how another distribution brings a sink for the logs of jobs.

A sink is an entry point of the group :data:`GROUP`, ``acme = "acme.log:open_sink"``: a function
that gets the site config and returns a ``logging.Handler``. If ``sinks`` in ``[plugin.joblog]``
names it the sinks' process imports and calls it, as root, in a thread of its own: within ten
seconds it opens what needs root (a secret, a socket). If it raises, that is logged once and tried
again, as root a minute later. Then the process becomes ``[plugin.joblog] uid``, without rights and
unable to write a file; all of the handler's methods run there, in another thread of the sink's own.

The handler gets one record at a time and may block: nobody waits for it. If it raises OSError or
HostFault it gets the same record again later; after anything else the record is left out. Where the
process was killed it may get its last records again. At the end ``close`` has less than half a
second. Records have the attributes ``job``, ``node``, ``guest``, ``phase``, ``plugin``, ``uid`` (of
the job's owner) and ``entry``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

GROUP = "vtorque1.joblog"


def entry_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return a record that a sink got as the object that ``log.jsonl`` has: JSON values, harmless.

    Keys: ``t`` (Unix seconds), ``level``, ``logger``, ``plugin``, ``phase``, ``guest`` (index on
    this node, or None), ``node``, ``job``, ``message``, and perhaps ``detail``, a list of lines.
    """
    entry: Mapping[str, Any] = record.__dict__["entry"]
    return entry


def one_line(entry: Mapping[str, Any]) -> str:
    """Return an entry as people read it, without time and job; what of ``detail`` fits is in it."""
    guest = entry.get("guest")
    place = f"{entry.get('phase') or '-'}{'' if guest is None else f' g{guest}'}"
    text = f"{entry.get('level')} [{place}] {entry.get('logger')}: {entry.get('message')}"
    detail = entry.get("detail") or []
    return " | ".join([text, *map(str, detail)])
