"""What runs in the guest when the job is cancelled, while its script still runs.

In the job shell, as the job's user, in a thread of its own: another agent in the guest runs it.
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
from vtorque_linux_guest.job.start_request import Start
from vtorque_linux_guest.job.stream import Session


def run(
    guest: ReadyGuest, start: Start, streams: Streams, say: Callable[[str], None], seconds: float
) -> None:
    """Run it and return when it has ended, at most so many seconds later; what goes wrong is said.

    What still runs then gets TERM in the guest, and 5 s later KILL.
    """
    with Events() as events, socket.socket(socket.AF_UNIX) as connection:
        late = threading.Timer(seconds, events.stop, (f"it took longer than {seconds:g} s",))
        late.start()
        try:
            connection.connect(str(guest.run_dir / CANCEL_SOCKET))
            session = Session(connection)
            session.hello(time.monotonic() + seconds)
            session.run(start, None, streams.stdout, streams.stderr, events)
        except (StreamError, OSError) as error:
            say(f"what runs when the job is cancelled: {error}")
        finally:
            late.cancel()
            late.join()
