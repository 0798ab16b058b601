"""``-vm show_log=true`` in the job shell: the job's log, line by line, in its error output.

As the user, on the node, where the log is: the batch system brings the error output to wherever
the user looks at it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from vtorque_core.api import kept_records
from vtorque_core.base.names import Paths
from vtorque_core.node.shell.proof import Proof

_LAST = 2.0  # seconds for the last lines; an error output that nobody reads takes no more


class ShownLog:
    """Says the log of one job attempt, from a thread; ``say`` writes one message, or loses it."""

    def __init__(self, paths: Paths, say: Callable[[str], None]) -> None:
        self._paths = paths
        self._say = say
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, proof: Proof) -> None:
        """Begin, at the first call, if the job asks for it."""
        if not proof.show_log or self._thread is not None:
            return
        place = kept_records.place(self._paths, proof.job)
        self._thread = threading.Thread(target=self._copy, args=(place,), daemon=True)
        # The thread inherits the mask: signals are for the main thread, which may block and await
        # them (pthread_sigmask(3)).
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        """Copy what is there by now, and end."""
        if self._thread is not None:
            self._over.set()
            self._thread.join(_LAST)

    def _copy(self, place: kept_records.Place) -> None:
        from vtorque_core.api import job_log  # noqa: PLC0415 - few jobs need it

        for entry in job_log.entries(place, self._over.is_set):
            self._say(job_log.text(entry))
