"""Helpers of the ``vmgr images`` commands."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vtorque_core.api import UsageError
from vtorque_core.live.images import Sidecar, Site, signer_of, store

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY = 10.0  # seconds between two progress reports without a terminal

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def users_of(home: Path, uses: store.Uses) -> tuple[str, ...]:
    """Return the jobs that use any version of the image in the directory ``home``."""
    inside = f"{home}/"
    jobs = {job: None for path, jobs in uses.items() if path.startswith(inside) for job in jobs}
    return tuple(jobs)


def signer_of_image(site: Site, sidecar: Sidecar) -> str | None:
    """Return the signer of an image, or None if this site requires no signatures.

    Raises Refused if no configured signer signed the image, HostFault if this cannot be checked.
    """
    if not site.images.signers:
        return None
    return signer_of(sidecar, Path(site.images.signers))


def write_json(value: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def pairs(options: tuple[str, ...], flag: str) -> dict[str, str]:
    """Return the KEY=VALUE pairs of a repeatable option. Raises UsageError."""
    found: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key or key in found:
            raise UsageError(f"{flag} {option}: must be KEY=VALUE, each key once")
        found[key] = value
    return found


def age(when: str, now: datetime | None = None) -> str:
    """Return the time since ``when`` (ISO 8601) in one unit: ``5m``, ``3h`` or ``12d``."""
    try:
        seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(when)).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def size(count: int) -> str:
    """Format bytes in binary units: ``2.6M``."""
    value = float(count)
    for unit in ("B", "K", "M", "G"):
        if value < 1000:
            return f"{value:.0f}{unit}" if value >= 10 or unit == "B" else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}T"


class ProgressBars:
    """A display of steps and their progress on stderr: bars on a terminal, otherwise lines."""

    def __init__(self, bars: Progress | None) -> None:
        self._bars = bars
        self._start = self._told = time.monotonic()
        self._task: Any = None

    def step(self, text: str) -> None:
        """Show the name of a new step."""
        self._told = time.monotonic()
        if self._bars is None:
            click.echo(f"{self._told - self._start:6.1f} s  {text}", err=True)
            return
        if self._task is not None:
            self._bars.update(self._task, total=1, completed=1)
        self._task = self._bars.add_task(text.replace("[", r"\["), total=None)

    def show_progress(self, done: int, total: int) -> None:
        """Show the progress of the current step."""
        if self._bars is not None:
            self._bars.update(self._task, completed=done, total=max(total, 1))
        elif time.monotonic() - self._told >= _EVERY:
            self.step(f"{100 * done // max(total, 1)}%")


@contextmanager
def bars() -> Iterator[ProgressBars]:
    """Yield a progress display for standard error."""
    if not sys.stderr.isatty():
        yield ProgressBars(None)
        return
    from rich.console import Console  # noqa: PLC0415 - only where somebody watches
    from rich.progress import Progress  # noqa: PLC0415 - as above

    with Progress(console=Console(stderr=True)) as shown:
        yield ProgressBars(shown)
