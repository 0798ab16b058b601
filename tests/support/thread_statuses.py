"""Read the kernel's status of each thread of a running process."""

from contextlib import suppress
from pathlib import Path


def thread_statuses(pid: int | str) -> dict[str, dict[str, list[str]]]:
    """Return each thread's ``status``, proc(5): field to its words, by thread ID.

    A thread that ends between the listing and its reading (a server's threads may) is left out.

    Raises:
        AssertionError: the process has no thread: it has ended.
    """
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = (line.partition(":") for line in (task / "status").read_text().splitlines())
            found[task.name] = {name: value.split() for name, _, value in lines}
    assert found, f"process {pid} has no thread"
    return found
