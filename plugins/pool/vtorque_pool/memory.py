"""What no cloud and no batch system knows: who is held, which shape is paused, what was counted.

One file in ``[plugin.pool] state``, changed under a lock and replaced in one step. Without it the
pool goes on: nothing of what is true of machines and nodes is in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, replace_file, take_lock

_LOCK_TIME = 30.0  # seconds; it is held for a file's reading and writing only


@dataclass
class Counted:
    """Of one shape, since the file is there. ``seconds``: from machine made to node registered."""

    starts: int = 0
    failures: int = 0
    registered: int = 0
    seconds: float = 0.0


@dataclass
class Remembered:
    """The file's content. Times in seconds since 1970."""

    held: dict[str, str] = field(default_factory=dict)
    """Node to why its machine is kept."""
    failed: dict[str, list[float]] = field(default_factory=dict)
    """Shape to when machines of it failed."""
    paused: dict[str, float] = field(default_factory=dict)
    """Shape to until when none is made."""
    why: dict[str, str] = field(default_factory=dict)
    """Shape to its last failure."""
    counted: dict[str, Counted] = field(default_factory=dict)
    """Shape to what was counted."""
    seen: dict[str, float] = field(default_factory=dict)
    """Machine to when its node had registered; counted once."""

    def of(self, shape: str) -> Counted:
        """Return a shape's counters."""
        return self.counted.setdefault(shape, Counted())

    def is_paused(self, shape: str, now: float) -> bool:
        """Whether no machine of a shape is made now."""
        return self.paused.get(shape, 0.0) > now

    def fail(self, shape: str, why: str, now: float, most: int, pause: float) -> bool:
        """Note a failure; return whether it has paused the shape.

        ``most`` failures within ``pause`` seconds do.
        """
        self.of(shape).failures += 1
        recent = [when for when in self.failed.get(shape, []) if now - when < pause]
        self.failed[shape] = [*recent, now]
        self.why[shape] = why
        if len(self.failed[shape]) < most or self.is_paused(shape, now):
            return False
        self.paused[shape] = now + pause
        return True

    def release(self, shape: str) -> None:
        """Forget a shape's failures: it is tried again."""
        for table in (self.failed, self.paused, self.why):
            table.pop(shape, None)

    def registered(self, machine: str, shape: str, created: float, when: float) -> None:
        """Note that a machine's node has registered, once. It ends the row of failures."""
        if machine in self.seen:
            return
        self.seen[machine] = when
        counted = self.of(shape)
        counted.registered += 1
        counted.seconds += max(0.0, when - created)
        if not self.is_paused(shape, when):
            self.release(shape)


class Memory:
    """The file."""

    def __init__(self, directory: Path, log: Callable[[str], None]) -> None:
        self.directory = directory
        self._path = directory / "memory.json"
        self._log = log

    def read(self) -> Remembered:
        """Return its content; nothing where it is not what we have written, which is put aside.

        Raises HostFault where it cannot be read.
        """
        try:
            return _remembered(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return Remembered()
        except OSError as error:
            raise HostFault(f"{self._path}: {error.strerror}") from None
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            bad = self._path.with_suffix(".bad")
            with contextlib.suppress(OSError):
                self._path.replace(bad)
            self._log(f"{bad}: holds, pauses and counts are lost, it is no memory: {error!r}")
            return Remembered()

    @contextlib.contextmanager
    def changed(self) -> Iterator[Remembered]:
        """Give the content to change; it is written at the end. Raises HostFault."""
        lock = take_lock(self.directory / "memory.lock", _LOCK_TIME)
        try:
            found = self.read()
            yield found
            try:
                text = json.dumps(dataclasses.asdict(found)).encode()
                replace_file(str(self._path), text, mode=0o600)
            except OSError as error:
                raise HostFault(f"{self._path}: {error.strerror}") from None
        finally:
            os.close(lock)


def _remembered(data: Any) -> Remembered:
    """Return what a file has. Raises what its values raise that are of another type."""
    return Remembered(
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
    "counted": lambda each: Counted(
        int(each["starts"]), int(each["failures"]), int(each["registered"]), float(each["seconds"])
    ),
    "seen": float,
}
