"""Address and credentials of snapteld, and access to fields of its answers."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlsplit

_OWN = ("localhost", "127.0.0.1", "::1")


class Access(NamedTuple):
    """Address and credentials of snapteld.

    ``version`` is v1 or v2. ``password`` and ``ca`` are paths of files, or empty.
    """

    url: str
    version: str
    user: str = ""
    password: str = ""
    ca: str = ""


def is_local(url: str) -> bool:
    """Return whether a URL refers to this machine."""
    return urlsplit(url).hostname in _OWN


def value_at(value: Any, path: str) -> Any:
    """Return the value at a path such as ``a.b`` in nested objects, or None."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
