"""The host side of the status port, a virtio-serial port: setup steps, READY, clock and logs.

Messages are lines of UTF-8, at most 4096 bytes. The guest is hostile, so this module runs in an
unprivileged process on the node (:mod:`vtorque_linux_guest.job.readiness`).
"""

import base64
import select
import socket
import time
from collections.abc import Iterator

from vtorque_linux_guest.job.frames import (
    ConnectionEnded,
    GuestFailed,
    GuestSilent,
    StreamError,
    printable_text,
)

LINE_MAX = 4096
TOTAL_MAX = 1 << 20
LINES_MAX = 10_000
LOG_MAX = 65536


class StatusReader:
    """A client of the status port; `sock` is a connected Unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self._total = self._lines = 0
        self.step = ""

    def steps(self, deadline: float) -> Iterator[str]:
        """Yield the printable name of each new setup step, until the guest reports READY.

        Sets the guest's clock on the first step, because make(1) and rsync(1) compare file times
        from the node with the clock. Before, the clock is up to a second late (rtc(4)).

        `deadline` is in time.monotonic() seconds. Raises GuestFailed (with the guest's reason),
        ConnectionEnded, GuestSilent (with the last step), or StreamError for invalid or excessive
        output.
        """
        self._ask(b"STATUS\n", deadline)
        while True:
            word, _, rest = self._line(deadline).partition(" ")
            if word == "READY":
                return
            if word == "FAILED":
                raise GuestFailed(rest or "no reason given")
            if word == "STEP" and rest and rest != self.step:
                if not self.step:
                    self._tell_time(deadline)
                self.step = rest
                yield rest

    def _tell_time(self, deadline: float) -> None:
        now = time.clock_gettime_ns(time.CLOCK_REALTIME)
        self._ask(b"TIME %d.%09d\n" % divmod(now, 1_000_000_000), deadline)

    def set_clock(self, deadline: float) -> None:
        """Set the guest's clock and wait for confirmation. Raises as :meth:`steps`."""
        self._tell_time(deadline)
        while not self._line(deadline).startswith("CLOCK "):
            pass

    def sync(self, deadline: float) -> None:
        """Flush the guest's file systems and wait for confirmation. Raises as :meth:`steps`."""
        self._ask(b"SYNC\n", deadline)
        while self._line(deadline) != "SYNCED":
            pass

    def hold(self, seconds: int, deadline: float) -> None:
        """Keep the guest's session for some seconds if the connection to the job shell breaks.

        ``seconds`` count on the guest's clock; 0 cancels an earlier call. Sends HOLD and LOG: an
        agent that is too old answers only LOG. Raises StreamError if the agent is too old or no job
        shell is connected, and the errors of :meth:`steps`.
        """
        self._ask(b"HOLD %d\nLOG /\n" % seconds, deadline)
        said = ""
        while (line := self._line(deadline)) != "LOGGED":
            said = line.removeprefix("HELD ") if line.startswith("HELD ") else said
        if seconds and said in ("", str(seconds)):
            raise StreamError(
                "the agent of the guest's image is too old to save guests: rebuild the image"
            )
        if seconds and said != f"{seconds} tells":
            raise StreamError("no job shell is connected to the guest, so it cannot be saved")

    def log(self, path: str, deadline: float) -> Iterator[bytes]:
        """Yield the last `LOG_MAX` bytes of a file in the guest; yield nothing for a missing file.

        The bytes are untrusted. Raises as :meth:`steps`, after the bytes received so far. Raises
        GuestSilent if the agent does not support LOG.
        """
        self._ask(f"LOG {path}\n".encode(), deadline)
        left = LOG_MAX
        while (line := self._line(deadline)) != "LOGGED":
            word, _, text = line.partition(" ")
            if word != "LOG":
                continue
            try:
                piece = base64.b64decode(text, validate=True)
            except ValueError:
                raise StreamError("the guest sent invalid base64 in a line of a log") from None
            if len(piece) > left:
                raise StreamError(f"the guest sent more than {LOG_MAX} bytes of a log")
            left -= len(piece)
            yield piece

    def _last_step(self) -> str:
        return f"last step: {self.step}" if self.step else "no step seen"

    def _wait(self, event: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        poller = select.poll()
        poller.register(self._sock, event)
        if left <= 0 or not poller.poll(left * 1000):
            raise GuestSilent(f"the guest was not ready in time ({self._last_step()})")

    def _ask(self, line: bytes, deadline: float) -> None:
        self._wait(select.POLLOUT, deadline)
        try:
            self._sock.send(line)
        except OSError as error:
            raise ConnectionEnded(f"the guest died ({self._last_step()})") from error

    def _line(self, deadline: float) -> str:
        while True:
            end = self._buffer.find(b"\n")
            if end > LINE_MAX or (end < 0 and len(self._buffer) > LINE_MAX):
                raise StreamError(f"the guest sent a status line of more than {LINE_MAX} bytes")
            if end >= 0:
                line = printable_text(bytes(self._buffer[:end]))
                del self._buffer[: end + 1]
                self._lines += 1
                return line
            self._wait(select.POLLIN, deadline)
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(LINE_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise ConnectionEnded(f"the guest died ({self._last_step()})") from error
        if not data:
            raise ConnectionEnded(f"the guest died ({self._last_step()})")
        self._buffer += data
        self._total += len(data)
        if self._total > TOTAL_MAX or self._lines > LINES_MAX:
            raise StreamError(f"the guest floods its status port: {self._total} bytes")
