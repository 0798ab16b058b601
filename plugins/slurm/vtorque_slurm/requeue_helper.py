"""Requeue a job when its script in the guest calls ``scontrol requeue``.

The job shell starts ``python -I -m vtorque_slurm.requeue_helper SOCKET JOB BINDIR CONF TIMEOUT`` as
the job's owner, beside the script. The guest is hostile: a request names no job, and this process
requeues only its own job, with the owner's rights.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

_MAX_LINE = 32  # bytes of a request
_PAUSE = 1.0  # seconds between two attempts to connect, and between two requests


def serve(port: socket.socket, requeue: Callable[[], str]) -> None:
    """Answer each line ``requeue N`` with ``N 0``, or with ``N 1 REASON``, until the guest ends.

    ``requeue`` returns the reason of a failure. SIGTERM waits until the answer is sent, because
    Slurm terminates all processes of a requeued job.
    """
    with port.makefile("rb") as lines:
        while line := lines.readline(_MAX_LINE):
            word, _, number = line.decode("ascii", "replace").partition(" ")
            if word != "requeue" or not number.endswith("\n") or not number[:-1].isdecimal():
                continue
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            reason = requeue()
            answer = f"{number[:-1]} 1 {reason}" if reason else f"{number[:-1]} 0"
            port.sendall(f"{answer}\n".encode())
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            time.sleep(_PAUSE)


def requeue_job(job_id: str, bindir: str, conf: str, seconds: float) -> str:
    """Requeue a job, only one element of an array; return the reason of a failure in one line."""
    from vtorque_core.api import HostFault, Refused, printable  # noqa: PLC0415 - few jobs need it
    from vtorque_slurm import controller_updates  # noqa: PLC0415 - as above
    from vtorque_slurm.batch_commands import SlurmClient  # noqa: PLC0415 - as above
    from vtorque_slurm.settings import Settings  # noqa: PLC0415 - as above

    client = SlurmClient(Settings(bindir=bindir, conf=conf, timeout=seconds), os.environ)
    try:
        controller_updates.requeue(client, job_id)
    except (HostFault, Refused) as error:
        hint = ""
        if "disabled" in str(error):
            hint = ". Submit the job with --requeue: JobRequeue=0 in slurm.conf or --no-requeue"
        return printable(f"{error}{hint}", 500)
    return ""


def main() -> None:
    """Connect to the guest's port, also again after a restore of the guest, and serve requests."""
    path, job_id, bindir, conf, seconds = sys.argv[1:]
    while True:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as port:
            port.connect(path)
            serve(port, lambda: requeue_job(job_id, bindir, conf, float(seconds)))
        time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
