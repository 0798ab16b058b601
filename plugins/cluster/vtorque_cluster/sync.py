"""Fill nodes' own caches of images, as root: pushed from where the pool is, taken on the node.

A copy grows in ``<cache>/.partial/<name>/<version>/`` and stays there when it is interrupted: the
next time it goes on where it was. Only what has the hash that the pool's sidecar says becomes an
image of the cache, by the same rename as in a pool.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from vtorque_cluster import cache
from vtorque_cluster.cache import Places
from vtorque_core.api import HostFault, run_tool, take_lock

PARTIAL = ".partial"
NODE_TIME = 86400.0  # seconds for one node


@dataclass(frozen=True)
class Synced:
    """What a synchronisation did: names copied, there already, removed."""

    copied: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def push(places: Places, wanted: Sequence[str], node: str, ssh: str = "ssh") -> None:
    """Send images (none named: all) to a node with rsync(1), less the files that its cache has.

    Resumable; ``receive`` must follow there. Raises Refused, HostFault with rsync's words.
    """
    found = cache.files(places, wanted).values()
    parts = [f"{places.pool}/./{file}" for files in found for file in files]
    target = f"{places.cache}/{PARTIAL}"
    quoted = "'" + target.replace("'", "'\\''") + "'"
    run_tool(
        *("rsync", "--relative", "--times", "--perms", "--partial", "--inplace", "--sparse"),
        *(f"--compare-dest={places.cache}", "--modify-window=-1"),  # size and time, to the ns
        *("--protect-args", f"--rsync-path=mkdir -p {quoted} && rsync"),
        *("-e", f"{ssh} -o BatchMode=yes", "--", *parts, f"{node}:{target}/"),
        timeout=NODE_TIME,
    )


def receive(places: Places, wanted: Sequence[str], *, only: bool = False) -> Synced:
    """Take what :func:`push` has left in the cache's partial directory. On the node.

    Args:
        places: with a cache that is made if it is missing.
        wanted: what was pushed.
        only: all else that the cache has goes when it is free.

    Raises Refused: a copy that is not what the pool says; HostFault: no room, or another
    synchronisation is at work.
    """
    try:
        sent = cache.receiving(places, PARTIAL)
        lock = take_lock(places.paths.run / "image-sync.lock", 0)
        try:
            new = cache.take(places, sent, wanted)
            gone = cache.keep_only(places, wanted) if only else []
            for part in sent.iterdir() if only else ():
                shutil.rmtree(part, ignore_errors=True)
        finally:
            os.close(lock)
    except OSError as error:
        raise HostFault(f"{places.cache}: {error.strerror}") from None
    same = tuple(name for name in wanted if name not in new)
    return Synced(tuple(new), same, tuple(gone))
