"""Run tools on untrusted disk images: as nobody, with resource limits, on open descriptors.

The caller must validate files that a tool writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

from vtorque_core.api.children import wait_readable
from vtorque_core.base.errors import HostFault, Refused, printable
from vtorque_core.base.run_tool import guard_command, isolate_command
from vtorque_core.base.seccomp import deny_calls_command as deny_calls_command

Told = Callable[[int, int], None]
"""A function that gets the progress: (done, total)."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STACK = 1 << 20  # bytes per thread: qemu-img has up to 64, whose stacks count against _MEMORY
_MEMORY = 1 << 30  # bytes; a hostile image made qemu-img allocate any amount (CVE-2015-5162)
_ENV = {"PATH": _PATH, "LC_ALL": "C", "HOME": "/nonexistent", "DEBUGFS_PAGER": "cat"} | {
    "MALLOC_ARENA_MAX": "2"  # by default, glibc reserves 64 MiB of address space for many threads
}
_CPU = 3600  # seconds
_STALL = 300.0  # seconds without output after which a tool that reports progress counts as hanging
_MOST_OUTPUT = 1 << 20  # bytes of a tool's output that are kept
_PERCENT = re.compile(rb"\(([0-9]{1,3})\.[0-9]+/100%\)")


def path_of(descriptor: int) -> str:
    """Return the path by which a tool opens an inherited descriptor."""
    return f"/proc/self/fd/{descriptor}"


def run(
    *argv: str,
    files: tuple[int, ...],
    most: int,
    told: Told | None = None,
    seconds: float = _STALL,
    good: tuple[int, ...] = (0,),
) -> str:
    """Run a tool on open files and return its standard output.

    Args:
        argv: program and arguments. Name an open file by the result of :func:`path_of`.
        files: descriptors that the tool inherits.
        most: maximum size in bytes of a file that the tool writes.
        told: called with the percentage that ``qemu-img -p`` prints.
        seconds: time limit. With ``told``, each printed percentage restarts it.
        good: exit statuses that mean success.

    Raises Refused if the tool fails, HostFault if it is missing or the disk is full.
    """
    program = shutil.which(argv[0], path=_PATH)
    if program is None:
        raise HostFault(f"{argv[0]}: not found in {_PATH}: install it")
    limits = [f"--as={_MEMORY}", f"--stack={_STACK}", f"--cpu={_CPU}", f"--fsize={most}"]
    limits += ["--core=0", "--nofile=256"]
    with subprocess.Popen(
        guard_command(*isolate_command(), "prlimit", *limits, "--", program, *argv[1:]),
        env=_ENV,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if told else subprocess.PIPE,
        pass_fds=files,
        cwd="/",
        start_new_session=True,
    ) as child:
        try:
            said, wrong = _listen(child, told, seconds)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
    if (code := child.returncode) not in good:
        output = printable((wrong or said).decode("utf-8", "replace").strip()[-300:], 400)
        if code == -signal.SIGXFSZ or "File too large" in output:
            output = f"needs more than the {most >> 20} MiB that are free"
        elif "No space left" in output:
            raise HostFault(f"{argv[0]}: {output}")
        raise Refused(f"{argv[0]} failed: {output or f'exit code {code}'}")
    return said.decode("utf-8", "surrogateescape")


def _listen(child: subprocess.Popen[bytes], told: Told | None, seconds: float) -> tuple[bytes, ...]:
    pipes = [pipe for pipe in (child.stdout, child.stderr) if pipe is not None]
    said = {pipe.fileno(): b"" for pipe in pipes}
    waiting = set(said)
    end = time.monotonic() + seconds
    while waiting:
        ready = wait_readable(waiting, end - time.monotonic())
        if not ready:
            raise Refused(f"the tool timed out after {seconds:g} s")
        for number in ready:
            data = os.read(number, 65536)
            if not data:
                waiting.discard(number)
            said[number] += data[: _MOST_OUTPUT - len(said[number])]
            if told is not None and (found := _PERCENT.findall(data)):
                told(int(found[-1]), 100)
                end = time.monotonic() + seconds
    return (*said.values(), b"")[:2]
