"""The pool's own state: held nodes, paused shapes (kinds of nodes) and counters.

The state is one file in ``[plugin.pool] state``, changed under a lock and replaced atomically. The
pool also works without the file, because clouds and batch system report all machines and nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, closing, name_errors, replace_file, take_lock

_LOCK_TIME = 30.0  # seconds; the lock is held only to read and write a file


@dataclass
class ShapeCounters:
    """Counters of the machines of one shape.

    ``seconds`` is the total time of all registered machines from creation to registration.
    """

    starts: int = 0
    failures: int = 0
    registered: int = 0
    seconds: float = 0.0


@dataclass
class PoolState:
    """The pool's state. Times are Unix times."""

    held: dict[str, str] = field(default_factory=dict)
    """The reasons given with ``vtorque pool hold``, by node."""
    failed: dict[str, list[float]] = field(default_factory=dict)
    """Times of failures, by shape."""
    paused: dict[str, float] = field(default_factory=dict)
    """End of the pause, by shape."""
    why: dict[str, str] = field(default_factory=dict)
    """Text of the last failure, by shape."""
    counted: dict[str, ShapeCounters] = field(default_factory=dict)
    """Counters of machines, by shape."""
    seen: dict[str, float] = field(default_factory=dict)
    """Time when the node registered, by machine id."""

    def shape_counters(self, shape: str) -> ShapeCounters:
        """Return a shape's counters."""
        return self.counted.setdefault(shape, ShapeCounters())

    def is_paused(self, shape: str, now: float) -> bool:
        """Return True if the shape is paused at the Unix time ``now``."""
        return self.paused.get(shape, 0.0) > now

    def fail(self, shape: str, why: str, now: float, most: int, pause: float) -> bool:
        """Record a failure of a shape; return True if this failure pauses the shape.

        After ``most`` failures within ``pause`` seconds, a shape is paused for ``pause`` seconds.
        """
        self.shape_counters(shape).failures += 1
        recent = [when for when in self.failed.get(shape, []) if now - when < pause]
        self.failed[shape] = [*recent, now]
        self.why[shape] = why
        if len(self.failed[shape]) < most or self.is_paused(shape, now):
            return False
        self.paused[shape] = now + pause
        return True

    def release(self, shape: str) -> None:
        """Forget a shape's failures and its pause."""
        for table in (self.failed, self.paused, self.why):
            table.pop(shape, None)

    def record_registration(self, machine: str, shape: str, created: float, when: float) -> None:
        """Record, once, that a machine's node has registered; reset the shape's failures.

        ``created`` and ``when`` are the Unix times of creation and registration.
        """
        if machine in self.seen:
            return
        self.seen[machine] = when
        counted = self.shape_counters(shape)
        counted.registered += 1
        counted.seconds += max(0.0, when - created)
        if not self.is_paused(shape, when):
            self.release(shape)


class StateFile:
    """The file that keeps the pool's state (:class:`PoolState`)."""

    def __init__(self, directory: Path, log: Callable[[str], None]) -> None:
        self.directory = directory
        self._path = directory / "memory.json"
        self._log = log

    def read(self) -> PoolState:
        """Return the state; empty if the file is missing or invalid. An invalid file is renamed."""
        try:
            return _parse_state(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return PoolState()
        except OSError as error:
            raise HostFault(f"{self._path}: {error.strerror}") from None
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            bad = self._path.with_suffix(".bad")
            with contextlib.suppress(OSError):
                self._path.replace(bad)
            self._log(f"{bad}: invalid state file: holds, pauses and counts are lost: {error!r}")
            return PoolState()

    @contextlib.contextmanager
    def edit(self) -> Iterator[PoolState]:
        """Yield the state while holding the lock, and write it afterwards."""
        with closing(take_lock(self.directory / "memory.lock", _LOCK_TIME)):
            found = self.read()
            yield found
            with name_errors(self._path):
                text = json.dumps(dataclasses.asdict(found)).encode()
                replace_file(str(self._path), text, mode=0o600)


def _parse_state(data: Any) -> PoolState:
    return PoolState(
        **{
            name: {key: value(each) for key, each in data.get(name, {}).items()}
            for name, value in _VALUES.items()
        }
    )


_VALUES: dict[str, Callable[[Any], Any]] = {
    "held": str,
    "failed": lambda times: [float(each) for each in times],
    "paused": float,
    "why": str,
    "counted": lambda each: ShapeCounters(
        int(each["starts"]), int(each["failures"]), int(each["registered"]), float(each["seconds"])
    ),
    "seen": float,
}
