"""End a guest's QEMU so that libvirt notices the end at once.

If the connection to QEMU's monitor closes before QEMU has ended, libvirt polls for the end every
0.2 s (virProcessKillPainfullyDelay of libvirt 9.0). This module therefore duplicates QEMU's socket
descriptors. The duplicates keep the connection open until QEMU has ended.
"""

import contextlib
import os
import signal
import socket
import time
from itertools import islice

from vtorque_core.api.children import wait_readable
from vtorque_core.api.vcpu_threads import process_of
from vtorque_core.base import hypervisor, safefs
from vtorque_core.resources._user_daemon_exec import descriptor_of

PATIENCE = 0.5  # seconds for QEMU to end; libvirt then ends it
_MONITOR = "/monitor.sock"  # the end of the path that libvirt gives to QEMU
_MOST = 256  # descriptors of QEMU that are searched, in ascending order
# The attribute of a socket's link that has the protocol (sockfs, net/socket.c of Linux). The last
# close of a TCP socket could wait as long as its owner has set in SO_LINGER.
_PROTOCOL = "system.sockprotoname"


def end(name: str, uuid: str) -> None:
    """Send SIGTERM to a guest's QEMU, and wait until the process is gone. Best effort.

    Sends no signal if this process cannot keep QEMU's monitor connection open (see the module).

    Privileges: root.
    """
    if (process := process_of(name, uuid)) is None:
        return
    until = time.monotonic() + PATIENCE
    with contextlib.suppress(OSError), contextlib.ExitStack() as held:
        qemu = held.enter_context(safefs.closing(os.pidfd_open(int(process.name))))
        links = islice((process / "fd").iterdir(), _MOST)
        sockets = [link for link in links if "socket:" in str(link.readlink())]
        copies = [
            held.enter_context(socket.socket(fileno=descriptor_of(qemu, int(link.name))))
            for link in sockets
            if os.getxattr(link, _PROTOCOL).startswith(b"UNIX")
        ]
        # Checked again, because the pid could have been reused before pidfd_open().
        has_monitor = any(str(copy.getsockname()).endswith(_MONITOR) for copy in copies)
        if has_monitor and process_of(name, uuid) is not None:
            signal.pidfd_send_signal(qemu, signal.SIGTERM)
            hypervisor.library()  # imported while QEMU ends, because the caller needs it
            wait_readable([qemu], PATIENCE)
            while process.exists() and time.monotonic() < until:  # init has not reaped it yet
                time.sleep(0.002)
