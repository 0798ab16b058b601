"""Attacks through a path: preparation by the attacker, root's action, and a check for harm.

Each attack runs twice: with vTorque unchanged, and without the guard that the attack names. This
detects attacks that would fail anyway, and guards without effect.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import guards
from vtorque_core.base.errors import VtorqueError
from vtorque_core.resources import _user_daemon_exec

SECRET = b"root's own"
REFUSALS = (VtorqueError, OSError, ValueError, _user_daemon_exec._Step)

Removal = Callable[[pytest.MonkeyPatch], AbstractContextManager[None]]


@dataclass(frozen=True)
class Attack:
    """An attack on paths that root uses.

    Args:
        prepare: sets up files as the attacker, in the given directory.
        act: root's action in that directory.
        without: removes the guard.
        harmed: whether the attack succeeded, given the directory and the result of ``act``; by
            default, whether the directory ``victim`` was changed.
        hangs: whether the attack succeeds if root waits forever.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    without: Removal
    harmed: Callable[[Path, object], bool] = field(default=lambda top, _: touched(top))
    hangs: bool = False

    def run(self, top: Path) -> bool:
        """Run the attack; return whether the attack succeeded."""
        top.chmod(0o755)
        (top / "victim").mkdir()
        (top / "victim/file").write_bytes(SECRET)
        (top / "victim").chmod(0o750)
        (top / "dir").mkdir(mode=0o755)
        self.prepare(top)
        # Long enough for a busy machine, except where a hang is expected.
        done = outcome(lambda: self.act(top), 0.25 if self.hangs and _unguarded else 30)
        return done == "hangs" if self.hangs else self.harmed(top, done)

    def both(self, top: Path, patch: pytest.MonkeyPatch) -> tuple[bool, bool]:
        """Run the attack with the guard and without it; return whether each attack succeeded."""
        for name in ("guarded", "unguarded"):
            (top / name).mkdir()
        guarded = self.run(top / "guarded")
        with unguarded(self, patch):
            return guarded, self.run(top / "unguarded")


def touched(top: Path) -> bool:
    """Return whether anything of the victim's has changed."""
    victim = top / "victim"
    names = sorted(path.name for path in victim.iterdir()) if victim.exists() else []
    if names != ["file"] or (victim / "file").read_bytes() != SECRET:
        return True
    return (victim.stat().st_mode & 0o777, (victim / "file").stat().st_nlink) not in (
        (0o750, 1),
        (0o750, 2),  # a hard link of the attacker's
    )


def outcome(act: Callable[[], object], seconds: float) -> object:
    """Return the result, the refusal, or "hangs"."""

    def late(*_: object) -> None:
        raise AttackTimeout

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return act()
    except AttackTimeout:
        return "hangs"
    except REFUSALS as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class AttackTimeout(BaseException):
    """Time limit exceeded."""


_unguarded: list[bool] = []


@contextlib.contextmanager
def unguarded(attack: Attack, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the attack's guard during the block."""
    _unguarded.append(True)
    try:
        with attack.without(patch):
            yield
    finally:
        _unguarded.clear()


# -- Ways to remove a guard ------------------------------------------------------------------------


def flags(module: ModuleType, *names: str) -> Removal:
    """Let a module open files without these flags of open(2)."""

    @contextlib.contextmanager
    def removal(patch: pytest.MonkeyPatch) -> Iterator[None]:
        lost = 0
        for name in names:
            lost |= getattr(os, name)
        real = os.open

        def open_without(path: Any, wanted: int, *args: Any, **more: Any) -> int:
            return real(path, wanted & ~lost, *args, **more)

        patch.setattr(module.os, "open", open_without)
        yield
        patch.setattr(module.os, "open", real)

    return removal


def statement(module: ModuleType, function: str, words: str) -> Removal:
    """Let a function continue where it refuses with these words."""

    def removal(_: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        found = [g for g in guards.guards(module, (function,)) if words in g.text]
        assert len(found) == 1, (words, found)
        return guards.without(found[0])

    return removal


def plain(module: ModuleType, name: str, other: Callable[..., Any]) -> Removal:
    """Replace a function by a plain version that expects no attacker."""

    @contextlib.contextmanager
    def removal(patch: pytest.MonkeyPatch) -> Iterator[None]:
        real = getattr(module, name)
        patch.setattr(module, name, other)
        yield
        patch.setattr(module, name, real)

    return removal


def all_of(*removals: Removal) -> Removal:
    """Remove several guards: each alone would suffice."""

    @contextlib.contextmanager
    def removal(patch: pytest.MonkeyPatch) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in removals:
                stack.enter_context(each(patch))
            yield

    return removal


# -- Races -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def between(module: ModuleType, call: str, when: Callable[..., bool], do: Callable[[], object],
            *, after: bool = False) -> Iterator[None]:  # fmt: skip
    """Let the attacker ``do`` something just before (or after) root's system call, once."""
    real, todo = getattr(os, call), [do]

    def interrupted(*args: Any, **more: Any) -> Any:
        now = bool(todo) and when(*args)
        if now and not after:
            todo.pop()()
        result = real(*args, **more)
        if now and after:
            todo.pop()()
        return result

    setattr(module.os, call, interrupted)
    try:
        yield
    finally:
        setattr(module.os, call, real)
    assert not todo, "the call that the attack interrupts did not happen"
