"""Run a job in one guest through its REST server, in a thread of the job shell.

The thread records the server's errors, because the console does not show them.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Mapping, Sequence

from vtorque_osv.order import GuestProperties
from vtorque_osv.rest import POLL, PORT, Rest, RestError
from vtorque_osv.script import ProgramCall


class RestJob:
    """A job in one guest: prepare the guest, run the job's commands, shut down the guest."""

    def __init__(
        self,
        properties: GuestProperties,
        environ: Mapping[str, str],
        commands: Sequence[ProgramCall],
        port: int = PORT,
    ) -> None:
        self._properties = properties
        self._environ = environ
        self._commands = commands
        self._rest = Rest(properties.address, port)
        self._failure = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="osv rest", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> str:
        """Wait for the thread after the guest has ended; return an error or an empty string."""
        self._over.set()
        self._thread.join(10.0)
        return self._failure

    def _run(self) -> None:
        try:
            self._rest.wait(time.monotonic() + self._properties.seconds, self._over.is_set)
            for name, value in self._environ.items():
                self._rest.set_variable(name, value)
            for path, text in self._properties.files.items():
                self._rest.upload(path, text.encode())
            background: list[str] = []
            for command in self._commands:
                tids = self._rest.start(command.text())
                if command.end == ";":
                    self._await(tids)
                background += tids if command.end == "&" else []
            self._await(background)
        except (RestError, OSError, http.client.HTTPException, ValueError) as error:
            if not self._over.wait(1.0):  # otherwise OSv has ended, and the console shows why
                self._failure = f"OSv's REST server: {error}"
        while not self._over.wait(POLL):  # until the console has ended
            self._rest.power_off()
            self._over.wait(1.0)

    def _await(self, tids: Sequence[str]) -> None:
        for tid in tids:
            while not self._over.is_set() and not self._rest.is_finished(tid):
                self._over.wait(POLL)
