"""The state with which the job shell of a restored job resumes a session and its program."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class SessionState:
    """State of a session and its program, taken between two frames.

    The state is valid while the guest is paused or holds the session (``HOLD`` in `doc/stream.md`),
    because the guest then keeps all later output. Positions count the bytes of all frames in one
    direction. Fields with two values, except ``exit``, have one for stdout and one for stderr.
    """

    nonce: bytes
    stdin_window: int
    taken: int
    acknowledged: int
    unacknowledged: bytes
    """Sent bytes from position ``acknowledged`` on, which the guest may not have received."""
    stdin_read: int
    """Number of bytes read from stdin, including those in ``unacknowledged``."""
    stdin_credit: int
    stdin_open: bool
    granted: tuple[int, int]
    owed: tuple[int, int]
    ended: tuple[bool, bool]
    written: tuple[int, int]
    """Number of bytes written; the bytes in ``pending`` follow them."""
    pending: tuple[bytes, bytes]
    lost: tuple[str, ...]
    exit: tuple[int | None, int | None] | None
    """Exit code and signal of the program, or None while it runs."""

    def to_json(self) -> str:
        """Return the state as one line of text."""
        return json.dumps(asdict(self), default=bytes.hex)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`. Raises ValueError, TypeError or KeyError."""
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()
        }
        for name in ("nonce", "unacknowledged"):
            fields[name] = bytes.fromhex(fields[name])
        fields["pending"] = tuple(map(bytes.fromhex, fields["pending"]))
        return cls(**fields)
