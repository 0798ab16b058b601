"""Run the commands for a canceled job (``CancelCommand``) while the script still runs.

A second agent in the guest runs the commands as the job's user. A thread of the job shell waits for
them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from vtorque_core.api.guest_driver import ReadyGuest, Streams
from vtorque_linux_guest.guest.contract import CANCEL_SOCKET
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.frames import StreamError
from vtorque_linux_guest.job.start_request import StartRequest
from vtorque_linux_guest.job.stream import Session


def run(
    guest: ReadyGuest,
    start: StartRequest,
    streams: Streams,
    say: Callable[[str], None],
    seconds: float,
) -> None:
    """Run the commands for a canceled job; report errors with ``say``.

    After ``seconds``, the guest sends TERM to commands that still run, and KILL 5 s later.
    """
    with Events() as events, socket.socket(socket.AF_UNIX) as connection:
        late = threading.Timer(
            seconds, events.stop, (f"it exceeded its time limit of {seconds:g} s",)
        )
        late.start()
        try:
            connection.connect(str(guest.run_dir / CANCEL_SOCKET))
            session = Session(connection)
            session.hello(time.monotonic() + seconds)
            session.run(start, None, streams.stdout, streams.stderr, events)
        except (StreamError, OSError) as error:
            say(f"the script for a canceled job (on_cancel) has failed: {error}")
        finally:
            late.cancel()
            late.join()
