"""Start, find and kill the processes of jobs. The service is one thread, so fork is safe."""

from __future__ import annotations

import fcntl
import os
import pwd
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from vtorque_core.errors import printable

FAILED = 1  # exit code of a child that could not start its program


def boot_id() -> str:
    """Return the kernel's id of this boot, random(4)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stat_of(pid: int | str) -> tuple[int, int] | None:
    """Return session and start time (clock ticks) of a process, proc(5); None if it has ended."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    words = data[data.rindex(b")") + 2 :].split()
    return None if words[0] in (b"Z", b"X") else (int(words[3]), int(words[19]))


def members(session: int, uids: Collection[int], since: int) -> Iterator[int]:
    """Yield the session's processes of these users that started at or after ``since``."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := stat_of(entry.name)):
            try:
                owner = entry.stat().st_uid
            except OSError:
                continue
            if found[0] == session and owner in uids and found[1] >= since:
                yield int(entry.name)


def kill_session(session: int, uids: Collection[int], since: int, wait: float = 0.0) -> bool:
    """SIGKILL the whole session; return whether it is gone after at most ``wait`` seconds."""
    deadline = time.monotonic() + wait
    while pids := list(members(session, uids, since)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def launch(body: Callable[[], None], stdio: Sequence[int], on_pid: Callable[[int], None]) -> int:
    """Fork a session leader that runs ``body``; return a pipe that has its last words.

    ``body`` starts only when ``on_pid(pid)`` has returned: the pid is on disk by then, so that a
    new service finds the process. The child keeps no descriptor of the service: not its lock,
    not its clients.
    """
    go, said = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            # First to numbers that nothing has, then to 0, 1, 2 (and 3, 4: closed by execve).
            high = [fcntl.fcntl(f, fcntl.F_DUPFD_CLOEXEC, 100) for f in (*stdio, go[0], said[1])]
            for target, source in enumerate(high):
                os.dup2(source, target, inheritable=target < 3)
            os.closerange(5, 1 << 16)
            if os.read(3, 1):
                body()
                code = 0
        except BaseException as error:
            os.write(4, printable(str(error), 500).encode())
        finally:
            os._exit(code)
    os.close(go[0])
    os.close(said[1])
    try:
        on_pid(pid)
        os.write(go[1], b"g")
    except OSError:
        os.close(said[0])
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(go[1])
    return said[0]


def signal_group(pid: int, number: int) -> None:
    """Signal a child that leads its group, or that has not got so far yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)


def become(uid: int) -> pwd.struct_passwd:
    """Turn this process, for good, into the user with all groups; return the account."""
    account = pwd.getpwuid(uid)
    if os.geteuid() == 0:
        os.initgroups(account.pw_name, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(uid)
    return account


def open_output(path: str, default: str, truncate: bool) -> int:
    """Open an output file of the job, as the user; a directory gets the file ``default``."""
    if os.path.isdir(path):  # noqa: PTH112 (the user's text, kept as it is)
        path = os.path.join(path, default)  # noqa: PTH118
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if truncate else 0)
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise OSError(f"output file {path}: {error.strerror}") from None


def stdin_line(line: bytes) -> int:
    """Return a pipe to read with this one line in it (a job shell's standard input)."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    if os.write(write, line) < len(line):
        raise OSError("the script's arguments (-F) are too long")
    os.close(write)
    return read


def be_root_program(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Become one of the service's own programs. Raises OSError naming it."""
    os.chdir("/")
    os.umask(0o022)
    execute(argv, environ)


def execute(argv: Sequence[str], environ: Mapping[str, str], name: str | None = None) -> None:
    """Replace this process by the program. Raises OSError naming it."""
    try:
        os.execve(argv[0], [name or argv[0], *argv[1:]], environ)  # noqa: S606
    except OSError as error:
        raise OSError(f"cannot start {argv[0]}: {error.strerror}") from None
