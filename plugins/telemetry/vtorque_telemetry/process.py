"""The sampler as jobs see it: the resource that starts and ends it, and its socket. Root.

A hook imports this and not the sampler itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path

from vtorque_core.api import HostFault, Paths
from vtorque_core.live.node_process import NodeProcess

CHANNEL = "metrics.sock"
"""In a guest's run directory: the host's end of the port that the job's own lines come by."""

LAST = 0.5  # seconds that the end of a job waits for its last sample


class Sampler(NodeProcess):
    """One for all jobs of the node: see the module that it runs."""

    kind = "telemetry-sampler"
    name = "telemetry"
    module = "vtorque_telemetry.sampler"

    def create(self) -> None:
        """Start it. Its socket is there at once, so that what is there does not change later.

        Raises HostFault.
        """
        try:
            listen(Path(self.lock).with_suffix(".sock")).close()
        except OSError as error:
            raise HostFault(f"{self.lock}: {error.strerror}") from None
        super().create()

    def release(self) -> None:
        """End it, and remove what one that was killed has left."""
        super().release()
        for suffix in (".sock", ".sock.new"):
            Path(self.lock).with_suffix(suffix).unlink(missing_ok=True)


def last_sample(paths: Paths, key: str) -> None:
    """Have the sampler take a job's last sample, while its guests are still there. As root.

    Waits at most half a second; nothing is lost but that sample if there is no answer.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LAST)
        connection.connect(os.fspath(paths.run / "telemetry.sock"))
        connection.sendall(key.encode())
        # a pipe: what others have the end of could bring a descriptor that is slow to close
        _, ends, _, _ = socket.recv_fds(connection, 1, 1)
        for end in ends:
            select.select([end], [], [], LAST)
            os.close(end)


def listen(path: Path) -> socket.socket:
    """Return a socket of root's that listens there. Raises OSError."""
    fresh = path.with_suffix(".sock.new")
    fresh.unlink(missing_ok=True)
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.fspath(fresh))
        fresh.chmod(0o600)
        listener.listen(16)
        fresh.rename(path)
        undo.pop_all()
    return listener
