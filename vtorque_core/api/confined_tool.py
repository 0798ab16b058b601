"""Other people's disks in the hands of tools: as nobody, within limits, by descriptor only.

qemu-img and debugfs parse what a stranger wrote. They run without root's rights, and can open by
path only what everybody can; the files that they are to read and write are handed over open. What
they write is checked afterwards like anything else. As root (else: as the caller, for tests).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api_node import NOBODY, alone, guarded
from vtorque_core.errors import HostFault, Refused, printable
from vtorque_core.image_store import free_bytes
from vtorque_core.trust import effective_root

Told = Callable[[int, int], None]
"""Gets how much is done, of how much."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STACK = 1 << 20  # bytes of each thread's stack: of 64 threads, as qemu-img may have, they count
_MEMORY = 1 << 30  # bytes; a hostile image made qemu-img take any amount (CVE-2015-5162)
_ENV = {"PATH": _PATH, "LC_ALL": "C", "HOME": "/nonexistent", "DEBUGFS_PAGER": "cat"} | {
    "MALLOC_ARENA_MAX": "2"  # of glibc: else 64 MiB of address space for many a thread
}
_CPU = 3600  # seconds
_STALL = 300.0  # seconds without a word: a tool that reports progress hangs
_MOST_OUTPUT = 1 << 20  # bytes that are kept of what a tool says
_CHUNK = 16 << 20  # bytes copied at a time
_PERCENT = re.compile(rb"\(([0-9]{1,3})\.[0-9]+/100%\)")


@dataclass(frozen=True)
class Source:
    """A file of somebody's, open; ``stamp`` is what must not change while it is read."""

    path: Path
    descriptor: int
    size: int
    stamp: tuple[int, ...]

    def check_unchanged(self) -> None:
        """Refuse what was written to since it was opened."""
        if _stamp(os.fstat(self.descriptor)) != self.stamp:
            raise Refused("has changed while it was read: try again when nobody writes to it")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Open a regular file that is not a link; errors on it name it.

    Nothing else is even opened: that would wait (FIFO) or act (a device). Raises Refused.
    """
    shown = printable(str(path))
    try:
        handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{shown}: is {_kind(status.st_mode)}, not a file")
            descriptor = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not a path"
        raise Refused(f"{shown}: {reason}") from None
    try:
        if status.st_size == 0:
            raise Refused("is empty")
        yield Source(path, descriptor, status.st_size, _stamp(os.fstat(descriptor)))
    except Refused as error:
        raise Refused(f"{shown}: {error}") from None
    finally:
        os.close(descriptor)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


@contextmanager
def fresh(path: Path) -> Iterator[int]:
    """Make a file that a tool may read and write by its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if effective_root():
            os.fchown(descriptor, NOBODY, NOBODY)
        yield descriptor
    finally:
        os.close(descriptor)


def copy(source: Source, target: int, pool: Path, told: Told) -> None:
    """Copy a file's data and leave its holes: costs what its data costs.

    Raises Refused if it changes meanwhile, HostFault if the pool has no room.
    """
    data = min(source.size, os.fstat(source.descriptor).st_blocks * 512)
    if data > (free := free_bytes(pool)):
        raise HostFault(f"{pool} has {free >> 20} MiB left; {data >> 20} MiB are needed")
    os.ftruncate(target, source.size)
    done = 0
    for start, end in extents(source.descriptor, source.size):
        at = start
        while at < end:
            count = _copy_some(source.descriptor, target, at, min(_CHUNK, end - at))
            if count == 0:
                break  # it has become shorter: seen below
            at += count
            done += count
            told(done, max(data, done))
    source.check_unchanged()


def extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each stretch of data, as lseek(2) with SEEK_DATA finds them."""
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = min(size, os.lseek(descriptor, start, os.SEEK_HOLE))
        yield start, at


def _copy_some(source: int, target: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, count, at, at)  # shares blocks where it can
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise HostFault(f"copy: {error.strerror}") from None
    return os.pwrite(target, os.pread(source, count, at), at)


def path_of(descriptor: int) -> str:
    """Return how a tool names a file that it was handed."""
    return f"/proc/self/fd/{descriptor}"


def run(
    *argv: str,
    files: tuple[int, ...],
    most: int,
    told: Told | None = None,
    seconds: float = _STALL,
    good: tuple[int, ...] = (0,),
) -> str:
    """Run a tool on open files and return its stdout.

    Args:
        argv: the tool and its arguments; files as :func:`path_of` names them.
        files: the descriptors that it gets.
        most: bytes of the largest file that it may write.
        told: gets the percentage that qemu-img -p prints; ``seconds`` is then the time without
            progress, else the time for all.
        seconds: until it is killed.
        good: exit codes that are no failure.

    Raises Refused with its last words if it fails, HostFault if it is missing.
    """
    program = shutil.which(argv[0], path=_PATH)
    if program is None:
        raise HostFault(f"{argv[0]}: not found in {_PATH}: install it")
    limits = [f"--as={_MEMORY}", f"--stack={_STACK}", f"--cpu={_CPU}", f"--fsize={most}"]
    limits += ["--core=0", "--nofile=256"]
    child = subprocess.Popen(
        guarded(*alone(), "prlimit", *limits, "--", program, *argv[1:]),
        env=_ENV,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if told else subprocess.PIPE,
        pass_fds=files,
        cwd="/",
        start_new_session=True,
    )
    try:
        said, wrong = _listen(child, told, seconds)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        raise
    finally:
        code = child.wait()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    if code not in good:
        words = printable((wrong or said).decode("utf-8", "replace").strip()[-300:], 400)
        if code == -signal.SIGXFSZ or "File too large" in words:
            words = f"needs more than the {most >> 20} MiB that there are room for"
        elif "No space left" in words:
            raise HostFault(f"{argv[0]}: {words}")
        raise Refused(f"{argv[0]} gave up on it: {words or f'exit code {code}'}")
    return said.decode("utf-8", "surrogateescape")


def _listen(child: subprocess.Popen[bytes], told: Told | None, seconds: float) -> tuple[bytes, ...]:
    """Return what the child says on stdout and stderr until it ends. Raises Refused: it hangs."""
    pipes = [pipe for pipe in (child.stdout, child.stderr) if pipe is not None]
    said = {pipe.fileno(): b"" for pipe in pipes}
    waiting = set(said)
    end = time.monotonic() + seconds
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise Refused(f"a tool made no progress with it for {seconds:g} s")
        for number in ready:
            data = os.read(number, 65536)
            if not data:
                waiting.discard(number)
            said[number] += data[: _MOST_OUTPUT - len(said[number])]
            if told is not None and (found := _PERCENT.findall(data)):
                told(int(found[-1]), 100)
                end = time.monotonic() + seconds
    return (*said.values(), b"")[:2]
