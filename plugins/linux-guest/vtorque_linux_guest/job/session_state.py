"""What another job shell needs to go on with a session and the program that runs in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class SessionState:
    """A session's state between two frames, and its run's; pairs are of stdout and stderr.

    It is of use while the guest keeps what came later: from the moment that it stands still, or
    is held (``HOLD``). Positions count the bytes of all frames of one direction.
    """

    nonce: bytes
    stdin_window: int
    taken: int
    acknowledged: int
    unacknowledged: bytes
    """What the guest may lack, from position ``acknowledged`` on."""
    stdin_read: int
    """Bytes read of stdin: what the guest has not had of them is in ``unacknowledged``."""
    stdin_credit: int
    stdin_open: bool
    granted: tuple[int, int]
    owed: tuple[int, int]
    ended: tuple[bool, bool]
    written: tuple[int, int]
    """Bytes written; ``pending`` is what comes next."""
    pending: tuple[bytes, bytes]
    lost: tuple[str, ...]
    exit: tuple[int | None, int | None] | None
    """How the program has ended, if it has: code and signal."""

    def to_json(self) -> str:
        """Return it as a line of text."""
        return json.dumps(asdict(self), default=bytes.hex)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what :meth:`to_json` gave. Raises ValueError, TypeError, KeyError for others."""
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()
        }
        for name in ("nonce", "unacknowledged"):
            fields[name] = bytes.fromhex(fields[name])
        fields["pending"] = tuple(map(bytes.fromhex, fields["pending"]))
        return cls(**fields)
