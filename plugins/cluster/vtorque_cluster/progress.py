"""Show progress: a live line on a terminal, otherwise plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import click


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints the elapsed seconds and a text on standard error."""
    start = time.monotonic()

    def line(text: str) -> str:
        return f"{time.monotonic() - start:6.1f} s  {text}"

    if not sys.stderr.isatty():
        yield lambda text: click.echo(line(text), err=True)
        return
    from rich.console import Console  # noqa: PLC0415 - only for terminals

    console = Console(stderr=True)
    with console.status("starting") as status:

        def step(text: str) -> None:
            console.print(line(text), markup=False, highlight=False)
            status.update(text)

        yield step
