"""Two messages: from the job shell (user) to root, and from root to the job shell.

The job shell sends :class:`BootOrder` and root sends :class:`GuestProperties`. Both are JSON
objects (RFC 8259). A BootOrder is untrusted input, and root only validates the types of its values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vtorque_core.api import Refused

PROPERTIES = "osv.json"
"""Name of the file with the :class:`GuestProperties` in a guest's run directory. Root owns the
file, and the job's user can read it."""


@dataclass(frozen=True)
class BootOrder:
    """Message from the job shell to root: script, environment and working directory."""

    script: bytes
    environ: Mapping[str, str]
    cwd: str = ""

    def encode(self) -> bytes:
        """Return the JSON document."""
        data = {**asdict(self), "script": self.script.decode("utf-8", "surrogateescape")}
        return json.dumps(data).encode()

    @classmethod
    def decode(cls, data: bytes) -> BootOrder:
        """Parse a job shell's message. Runs as root. Raises Refused for invalid input."""
        try:
            found: dict[str, Any] = json.loads(data)
            script, environ, cwd = found["script"], found["environ"], found["cwd"]
            good = isinstance(script, str) and isinstance(cwd, str) and isinstance(environ, dict)
            if not good or not all(isinstance(value, str) for value in environ.values()):
                raise TypeError
            return cls(script.encode("utf-8", "surrogateescape"), environ, cwd)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused("cannot read the request to boot OSv") from None


@dataclass(frozen=True)
class GuestProperties:
    """Message from root to the job shell: properties of a guest.

    Attributes:
        begin: text with which the last console line before the job's output begins.
        named: the image's command lines, by the names that a script can call.
        files: files to upload to the guest by REST.
        environ: this guest's own variables.
        seconds: how long to wait for the guest's REST server to start.
    """

    mode: str
    address: str
    begin: str
    named: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 30.0

    def encode(self) -> bytes:
        """Return the JSON document."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> GuestProperties:
        """Parse the file :data:`PROPERTIES`, which is trusted because only root can write it."""
        return cls(**json.loads(data))
