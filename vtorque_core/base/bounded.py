"""Call code of a library or plugin that may hang, with a time limit."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Overdue(Exception):
    """The called code has not returned in time. Its thread may still run."""


def run_bounded(work: Callable[[], T], seconds: float, name: str = "") -> T:
    """Return the result of ``work``, which runs in a daemon thread.

    Raises Overdue after ``seconds``.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    context = contextvars.copy_context()  # the log's guest and plugin
    thread = threading.Thread(target=context.run, args=(run,), name=name or None, daemon=True)
    thread.start()
    thread.join(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    if not results:
        raise Overdue
    return results[0]
