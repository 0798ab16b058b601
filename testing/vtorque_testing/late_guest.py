"""Double of root's starter process, which boots guests when the job shell requests it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vtorque_core.api.guest_driver import ORDER_SOCKET, BootedGuest
from vtorque_core.resources.starter import BootStarter


@contextlib.contextmanager
def booting(run_dir: Path, boot: Callable[[bytes], Sequence[BootedGuest]]) -> Iterator[None]:
    """Run a thread that boots the guests when the job shell requests it.

    The socket for the request is in ``run_dir``. ``boot`` receives the request and returns the
    booted guests. An exception of ``boot`` is sent to the job shell.
    """
    path = str(run_dir / ORDER_SOCKET)
    listens = threading.Event()
    starter = BootStarter(socket=path, uid=os.getuid(), boot=boot)
    thread = threading.Thread(target=starter.serve, args=(listens.set,), daemon=True)
    thread.start()
    assert listens.wait(60), "root's process does not listen"
    try:
        yield
    finally:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as nobody:
            nobody.connect(path)  # ends the wait with an empty order if none came
        thread.join(60)
        Path(path).unlink(missing_ok=True)
