"""Find the objects to which a journal record refers, and observe their state.

The fault tests detect leftovers of any resource with this module. Fields of a record and properties
of its class contain paths, pids, and addresses or names of PCI functions and network interfaces.
MAC addresses, UUIDs and the field ``table`` identify domains and packet filters.

On a recorded node (:mod:`vtorque_testing.recorded`), a test's directory simulates a node. Domains
and packet filters are then files in this directory.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api.acquired import Resource
from vtorque_core.records.reading import arguments

_DOUBLED = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def named_objects(resource: Resource) -> Iterator[tuple[str, str]]:
    """Yield kind and name of each object to which a resource's fields and properties refer.

    The kinds are ``process``, ``path``, ``link`` (a network interface) and ``double`` (a domain or
    packet filter, which a recorded node simulates with a file).
    """
    for key, value in _values(resource):
        if key == "pid" and isinstance(value, int):
            yield "process", str(value)
        elif not isinstance(value, str):
            continue
        elif value.startswith("/"):
            yield "path", value
        elif _PCI.fullmatch(value):
            yield "path", f"/sys/bus/pci/devices/{value}/driver"
        elif value and (key == "table" or _DOUBLED.fullmatch(value)):
            yield "double", value
        elif value and "/" not in value and os.path.lexists(f"/sys/class/net/{value}"):
            yield "link", value


def _values(resource: Resource) -> Iterator[tuple[str, object]]:
    kind = type(resource)
    properties = [name for name in dir(kind) if isinstance(getattr(kind, name), property)]
    found = {name: getattr(resource, name) for name in properties} | arguments(resource)
    for name, value in found.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            yield name, each


def state(what: str, name: str) -> object:
    """Return the current state of an object, or None if it does not exist.

    The state of a directory includes the names in it, except for sticky directories such as
    ``/tmp``.
    """
    if what == "process":
        return Path("/proc", name).exists() or None
    path = f"/sys/class/net/{name}" if what == "link" else name
    try:
        status = os.lstat(path)
    except OSError:
        return None
    look: list[object] = [oct(status.st_mode), os.path.ismount(path)]
    if stat.S_ISLNK(status.st_mode):
        look.append(os.readlink(path))  # noqa: PTH115 - text
    elif stat.S_ISREG(status.st_mode):
        look.append(Path(path).read_bytes())
    elif stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_ISVTX:
        look.append(sorted(os.listdir(path)))  # noqa: PTH208 - text
    return look
