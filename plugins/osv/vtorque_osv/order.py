"""What the job shell sends to root (the order), and what root has told the job shell (the word).

Both are JSON objects (RFC 8259). The order is the user's: root takes it for text and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vtorque_core.api import Refused

WORD = "osv.json"
"""The word's file in a guest's run directory, root's, for the job's user to read."""


@dataclass(frozen=True)
class Order:
    """The job's script, its environment and its working directory in the guest."""

    script: bytes
    environ: Mapping[str, str]
    cwd: str = ""

    def encode(self) -> bytes:
        """Return it as bytes."""
        data = {**asdict(self), "script": self.script.decode("utf-8", "surrogateescape")}
        return json.dumps(data).encode()

    @classmethod
    def decode(cls, data: bytes) -> Order:
        """Read it as root. Raises Refused for anything but what :meth:`encode` gives."""
        try:
            found: dict[str, Any] = json.loads(data)
            script, environ, cwd = found["script"], found["environ"], found["cwd"]
            good = isinstance(script, str) and isinstance(cwd, str) and isinstance(environ, dict)
            if not good or not all(isinstance(value, str) for value in environ.values()):
                raise TypeError
            return cls(script.encode("utf-8", "surrogateescape"), environ, cwd)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused("the order to boot OSv cannot be read") from None


@dataclass(frozen=True)
class Word:
    """What the job shell must know of a guest.

    ``begin``: how the line of its console begins behind which the job's output is. ``named`` are
    the image's command lines, ``files`` what goes into the guest by REST, ``environ`` this
    guest's own variables, ``seconds`` how long its REST server may take.
    """

    mode: str
    address: str
    begin: str
    named: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 30.0

    def encode(self) -> bytes:
        """Return it as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Word:
        """Read what :meth:`encode` has given: root's own file."""
        return cls(**json.loads(data))
