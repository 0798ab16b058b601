"""The list of a user's checkpoints on this node, and requests to remove a checkpoint.

``<state>/survive/<uid>/`` has a list, which root writes and the user may read. It also has a FIFO
that only the user may write to. Each line in the FIFO is the id of a checkpoint to remove. Root's
watcher reads the FIFO and ignores unknown ids.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Paths, Refused, let_users, replace_file
from vtorque_core.api.children import Child
from vtorque_survive import request
from vtorque_survive.resume_options import checkpoint_id
from vtorque_survive.stored import GONE, Store

LIST, FIFO = "list.json", "remove.fifo"
_MOST = 4096  # bytes of a user's requests that are read at a time
_BEGINS = 10.0  # seconds for a new job's watcher to open the FIFO
_REMOVES = 300.0  # seconds to remove a checkpoint
_AGAIN = 60.0  # seconds between two updates of lists, if other nodes save to the directory
_POLL = 0.1  # seconds between two checks


@dataclass(frozen=True)
class ListedCheckpoint:
    """A listed checkpoint. ``made`` is a Unix time, ``size`` the bytes on disk."""

    id: str
    job: str
    owner: str
    node: str
    made: float
    size: int


def entries(store: Store) -> Iterator[ListedCheckpoint]:
    """Yield a user's checkpoints, oldest first. Needs root."""
    for each in store.manifests():
        size = 0
        with suppress(FileNotFoundError):  # removed in the meantime
            for file in (store.directory / each.id).iterdir():
                size += file.stat(follow_symlinks=False).st_blocks * 512
        yield ListedCheckpoint(each.id, each.job, each.owner, each.node, each.made, size)


def stores(top: Path) -> Iterator[Store]:
    """Yield the checkpoint store of each user. Needs root."""
    for path in sorted(top.iterdir()) if top.is_dir() else ():
        if path.name.isdecimal():
            yield Store(top, int(path.name))


def place(paths: Paths, uid: int) -> Path:
    """Return the directory of a user's checkpoint list and request FIFO."""
    return paths.state / "survive" / str(uid)


def publish(paths: Paths, store: Store) -> None:
    """Write a user's checkpoint list, and create the FIFO for requests to remove checkpoints.

    If the user has no checkpoints, remove the list and the FIFO. Needs root.
    """
    where, found = place(paths, store.uid), [asdict(each) for each in entries(store)]
    if not found:
        with suppress(FileNotFoundError):
            shutil.rmtree(where)
        return
    for path, mode in ((where.parent, 0o711), (where, 0o711)):
        with suppress(FileExistsError):
            path.mkdir()
            path.chmod(mode)
    fifo = where / FIFO
    if not fifo.exists() or fifo.stat().st_uid != store.uid:  # its creator was killed
        fifo.unlink(missing_ok=True)
        request.Fifo(str(fifo), store.uid).create()
    replace_file(
        str(where / LIST),
        json.dumps(found).encode(),
        mode=0o600,
        ready=lambda file: let_users(file, [store.uid], 6, 4),
    )


def read_list(paths: Paths, uid: int) -> list[ListedCheckpoint]:
    """Return the checkpoints in a user's list. Runs as that user."""
    file = place(paths, uid) / LIST
    try:
        found: list[dict[str, Any]] = json.loads(file.read_bytes())
        return [ListedCheckpoint(**each) for each in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise HostFault(f"{file}: {error}") from None


def age(paths: Paths, uid: int) -> float:
    """Return the age of a user's checkpoint list in seconds; 0 without a list."""
    with suppress(OSError):
        return max(0.0, time.time() - (place(paths, uid) / LIST).stat().st_mtime)
    return 0.0


def ask(paths: Paths, uid: int, name: str, seconds: float) -> None:
    """Ask the watcher to remove one of the calling user's checkpoints, and wait.

    Raises:
        Refused: If there is no such checkpoint.
        HostFault: If no watcher removes the checkpoint in time.
    """
    if all(each.id != name for each in read_list(paths, uid)):
        raise Refused(f"you have no checkpoint {name} on this node; vmgr checkpoints lists yours")
    fifo, begins = place(paths, uid) / FIFO, time.monotonic() + _BEGINS
    while not _write_line(fifo, f"{name}\n"):
        if time.monotonic() >= begins:
            raise HostFault(
                f"no vTorque process reads {fifo}. The process runs only while a job with guests "
                "is on this node: retry then, or ask your administrator to remove the checkpoint"
            )
        time.sleep(_POLL)  # no event reports a new reader of a FIFO
    until = time.monotonic() + seconds
    while any(each.id == name for each in read_list(paths, uid)):
        if time.monotonic() >= until:
            raise HostFault(f"checkpoint {name} is not removed yet: check with vmgr checkpoints")
        time.sleep(_POLL)  # only root can read, and so watch, the directory


def _write_line(fifo: Path, line: str) -> bool:
    """Write a line to the FIFO; return False if the FIFO has no reader."""
    try:
        descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(line.encode())
    except OSError:
        return False
    return True


def remove(store: Store, name: str) -> None:
    """Remove a checkpoint, and leftovers of interrupted removals. Needs root.

    The first step renames the checkpoint, so that no job can use it.
    """
    if not store.has(name):
        raise Refused(f"uid {store.uid} has no checkpoint {name}")
    try:
        _clear(store)
        (store.directory / name).rename(store.directory / f".{name}{GONE}")
        store.failure_file(name).unlink(missing_ok=True)
        _clear(store)
    except FileNotFoundError:
        raise Refused(f"checkpoint {name} was already removed") from None
    except OSError as error:
        raise HostFault(f"cannot remove checkpoint {name}: {error.strerror}") from None


def _clear(store: Store) -> None:
    for path in store.directory.glob(f".*{GONE}"):
        with suppress(FileNotFoundError):  # another process removes it, too
            shutil.rmtree(path)


class RemovalWatcher:
    """The watcher's removal of checkpoints, requested by their owners.

    The checkpoint directory may hang, so only child processes access it.
    """

    def __init__(self, paths: Paths, top: str, *, shared: bool = False) -> None:
        self._paths, self._top = paths, Path(top) if top else None
        self._fifos: dict[int, int] = {}
        self._again, self._pause = 0.0, _AGAIN if shared else float("inf")
        self._child: Child | None = None

    def poll(self) -> None:
        """Read new requests, and start the next removal."""
        if self._top is None:
            return
        if self._child is not None and not self._child.check():
            return
        top, self._child = self._top, None
        if time.monotonic() >= self._again:
            self._again = time.monotonic() + self._pause
            self._child = Child(lambda: _publish_all(self._paths, top), _REMOVES)
            return
        self._find()
        if wanted := [(uid, name) for uid, fifo in self._fifos.items() for name in _names(fifo)]:
            self._child = Child(lambda: _remove_all(self._paths, top, wanted), _REMOVES)

    def close(self) -> None:
        """Close the FIFOs."""
        for fifo in self._fifos.values():
            os.close(fifo)
        self._fifos.clear()

    def _find(self) -> None:
        for uid, fifo in list(self._fifos.items()):
            if not _is_same_fifo(fifo, place(self._paths, uid) / FIFO):
                os.close(self._fifos.pop(uid))
        for uid in _uids(self._paths) - self._fifos.keys():
            with suppress(OSError):  # it is being created or removed
                self._fifos[uid] = request.listen(place(self._paths, uid) / FIFO)


def _is_same_fifo(fifo: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fifo), path.stat(follow_symlinks=False))
    except OSError:
        return False


def _uids(paths: Paths) -> set[int]:
    top = place(paths, 0).parent
    names = [path.name for path in top.iterdir()] if top.is_dir() else []
    return {int(name) for name in names if name.isdecimal()}


def _publish_all(paths: Paths, top: Path) -> None:
    failed: list[Exception] = []
    for uid in _uids(paths) | {store.uid for store in stores(top)}:
        try:
            publish(paths, Store(top, uid))
        except (OSError, HostFault) as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _remove_all(paths: Paths, top: Path, wanted: list[tuple[int, str]]) -> None:
    for uid, name in wanted:
        with suppress(Refused):  # requested twice
            remove(Store(top, uid), name)
    for uid in {uid for uid, _ in wanted}:
        publish(paths, Store(top, uid))


def _names(fifo: int) -> Iterator[str]:
    with suppress(OSError, UnicodeDecodeError):
        *lines, cut = os.read(fifo, _MOST).decode("ascii").split("\n")
        if cut:  # too much input: ignore all of it
            _drain(fifo)
            return
        for line in lines:
            with suppress(ValueError):
                if line and checkpoint_id(line):
                    yield line


def _drain(fifo: int) -> None:
    with suppress(OSError):
        while os.read(fifo, _MOST):
            pass
