"""Kill a process and wait until it is dead."""

import os
import select
import signal


def kill_parent():
    """Kill this process's parent with SIGKILL, and return when it has ended."""
    handle = os.pidfd_open(os.getppid())
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    select.select([handle], [], [])
    os.close(handle)
