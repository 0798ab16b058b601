"""List processes of this machine, each of which may end at any time."""

import contextlib
from pathlib import Path


def with_word(word: str) -> list[int]:
    """Return the process ids of those whose command line has this word."""
    found = Path("/proc").glob("[0-9]*/cmdline")
    return [int(path.parent.name) for path in found if word.encode() in _content(path)]


def alive(pid: int | str) -> bool:
    """Return whether a process exists and is no zombie."""
    stat = _content(Path(f"/proc/{pid}/stat"))
    return bool(stat) and stat.rpartition(b")")[2].split()[0] not in {b"Z", b"X"}


def open_files(pid: int | str) -> set[str]:
    """Return the targets of a process's descriptors, proc_pid_fd(5).

    Raises OSError: it has ended, so it is unknown whether it has something open.
    """
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            found.add(str(link.readlink()))
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has just ended
