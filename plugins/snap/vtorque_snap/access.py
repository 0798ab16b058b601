"""Where snapteld is, how to get in, and how what it answers is read."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlsplit

_OWN = ("localhost", "127.0.0.1", "::1")


class Access(NamedTuple):
    """Where snapteld is and how to get in.

    ``version``: v1 or v2; ``password``, ``ca``: files, empty: none.
    """

    url: str
    version: str
    user: str = ""
    password: str = ""
    ca: str = ""


def is_local(url: str) -> bool:
    """Return whether a URL is of this machine."""
    return urlsplit(url).hostname in _OWN


def at(value: Any, path: str) -> Any:
    """Return what is at ``a.b`` in nested objects; None if it is not there."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
