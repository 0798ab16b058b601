"""The sampler as a resource of jobs, and its socket.

Hooks import this small module instead of the sampler. Privileges: root.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from vtorque_core.api import Paths, name_errors
from vtorque_core.api.children import wait_readable
from vtorque_core.live.node_process import NodeProcess

CHANNEL = "metrics.sock"
"""Name of the socket in a guest's run directory with metrics of the job's programs."""

LAST = 0.5  # seconds that the end of a job waits for its last sample


class Sampler(NodeProcess):
    """The sampler process, one for all jobs of the node (:mod:`vtorque_telemetry.sampler`)."""

    kind = "telemetry-sampler"
    name = "telemetry"
    module = "vtorque_telemetry.sampler"

    def create(self) -> None:
        """Start the sampler. Raises HostFault.

        The file of the sampler's socket exists when this call returns.
        """
        with name_errors(self.lock):
            listen(Path(self.lock).with_suffix(".sock")).close()
        super().create()

    def release(self) -> None:
        """End the sampler, and remove files that a killed sampler left."""
        super().release()
        for suffix in (".sock", ".sock.new"):
            Path(self.lock).with_suffix(suffix).unlink(missing_ok=True)


def last_sample(paths: Paths, key: str) -> None:
    """Request a job's last sample, while its guests still exist.

    Waits at most twice :data:`LAST` seconds. If the sampler does not answer, the sample is lost.

    Privileges: root.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LAST)
        connection.connect(os.fspath(paths.run / "telemetry.sock"))
        connection.sendall(key.encode())
        # a pipe, because a socket's peer could send a descriptor that is slow to close
        _, ends, _, _ = socket.recv_fds(connection, 1, 1)
        for end in ends:
            wait_readable([end], LAST)
            os.close(end)


def listen(path: Path) -> socket.socket:
    """Return a listening socket that only root can use. Raises OSError."""
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
