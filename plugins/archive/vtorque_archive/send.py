"""Pass a job's records to a process of the job's user, without waiting for that process.

A user's directory may hang (FUSE, unreachable server), be full, or consist of links. :func:`send`
therefore forks a process of root, which closes all descriptors, reads root's records, and forks
again. The second process permanently switches to the user and then accesses the directory. Other
processes of the user cannot inspect the second process (prctl(2), PR_SET_DUMPABLE). The first
process kills the second one after a timeout.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import syslog
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

from vtorque_archive import write
from vtorque_archive.pack import MAX_BYTES, MAX_FILES, is_kept, name_of, order
from vtorque_archive.plugin import Settings, directory_of
from vtorque_core.api import printable
from vtorque_core.api.children import wait_readable
from vtorque_core.api.kept_records import Place

PATIENCE = 60  # seconds for all work as the user, including packing
_OWN = 30  # seconds for the work as root: a lookup of the user's account may need a server
_ANSWER = 500  # bytes


def send(place: Place, settings: Settings) -> int:
    """Start writing a user's archive; return the pid of the supervising process.

    Privileges: root. Raises OSError if the fork fails.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _archive_record(place, settings)
        finally:
            os._exit(0)
    return pid


def _archive_record(place: Place, settings: Settings) -> None:
    _let_go()
    signal.alarm(PATIENCE + _OWN)
    said = "cannot be read"
    with contextlib.suppress(OSError, KeyError):  # the user no longer exists
        user = pwd.getpwuid(place.uid)
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        name = name_of(place.key, str(place.facts().get("node", "")))
        files = list(_files(place))
        if not files:
            return
        answers, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _be_the_user(user, groups, told, name, files, settings)
        os.close(told)
        said = _await_child(pid, answers)
    if said != "+":
        what = f"{settings.directory}: {printable(said)}"
        syslog.syslog(syslog.LOG_WARNING, f"vtorque archive: {place.key} was not copied: {what}")


def _let_go() -> None:
    """Detach from the parent: descriptors, locks, terminal, session and signal handlers."""
    os.setsid()
    os.chdir("/")
    syslog.closelog()
    os.closerange(0, (1 << 31) - 1)
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.nice(19)


def _files(place: Place) -> Iterator[tuple[str, bytes]]:
    left = MAX_BYTES
    names = sorted(filter(is_kept, os.listdir(place.directory)), key=order)  # noqa: PTH208
    for name in names[:MAX_FILES]:
        with contextlib.suppress(OSError):
            content = place.read(name, left + 1)
            if len(content) <= left:
                left -= len(content)
                yield name, content


def _await_child(pid: int, answers: int) -> str:
    """Wait for the child or kill it after the timeout; return its message, which is untrusted."""
    handle = os.pidfd_open(pid)
    if not wait_readable([handle], PATIENCE):
        signal.pidfd_send_signal(handle, signal.SIGKILL)  # no effect while it hangs in the kernel
        return f"nothing was written for {PATIENCE} s"
    os.set_blocking(answers, False)
    with contextlib.suppress(BlockingIOError):
        return (
            os.read(answers, _ANSWER).decode("utf-8", "replace") or "the transfer was interrupted"
        )
    return "the transfer was interrupted"


def _be_the_user(
    user: pwd.struct_passwd,
    groups: Sequence[int],
    told: int,
    name: str,
    files: Sequence[tuple[str, bytes]],
    settings: Settings,
) -> NoReturn:
    said = ""
    try:
        signal.alarm(PATIENCE + _OWN)  # in case the waiting process was killed
        if os.geteuid() == 0:
            os.setgroups(groups)
            os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
            os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
        os.umask(0o077)
        at = directory_of(settings.directory, user)
        write.write(at, name, files, settings, time.time())
        said = "+"
    except OSError as error:
        said = error.strerror or "OSError"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        os.write(told, said.encode("utf-8", "replace")[:_ANSWER])
        os._exit(0)
