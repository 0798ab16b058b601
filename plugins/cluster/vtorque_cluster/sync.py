"""Fill the nodes' image caches: push from the pool's host, receive on the node. Runs as root.

rsync(1) writes a copy of an image to ``<cache>/.partial/<name>/<version>/``. After an interruption,
rsync continues this copy. :func:`receive` moves it into the cache if it matches the sidecar.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from vtorque_cluster import cache
from vtorque_cluster.cache import ImagePlaces
from vtorque_core.api import closing, name_errors, run_tool, take_lock

PARTIAL = ".partial"
NODE_TIME = 86400.0  # seconds for one node


@dataclass(frozen=True)
class SyncResult:
    """The result of a synchronization: names of copied, unchanged, and removed images."""

    copied: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def push(places: ImagePlaces, wanted: Sequence[str], node: str, ssh: str = "ssh") -> None:
    """Send images (default: all) to a node with rsync(1). Skip files that the node's cache has.

    Continues an interrupted transfer. Afterwards :func:`receive` must run on the node.
    """
    found = cache.files(places, wanted).values()
    parts = [f"{places.pool}/./{file}" for files in found for file in files]
    target = f"{places.cache}/{PARTIAL}"
    quoted = "'" + target.replace("'", "'\\''") + "'"
    run_tool(
        *("rsync", "--relative", "--times", "--perms", "--partial", "--inplace", "--sparse"),
        *(f"--compare-dest={places.cache}", "--modify-window=-1"),  # compare times to the ns
        *("--protect-args", f"--rsync-path=mkdir -p {quoted} && rsync"),
        *("-e", f"{ssh} -o BatchMode=yes", "--", *parts, f"{node}:{target}/"),
        timeout=NODE_TIME,
    )


def receive(places: ImagePlaces, wanted: Sequence[str], *, only: bool = False) -> SyncResult:
    """Move the images that :func:`push` has sent into this node's cache.

    Args:
        places: The image directories; a missing cache is created.
        wanted: The images that were sent.
        only: Remove all other images from the cache. Files in use stay.

    Raises:
        Refused: If a copy does not match the pool's sidecar.
        HostFault: If the disk is full, or another synchronization runs.
    """
    with name_errors(places.cache):
        sent = cache.receive_directory(places, PARTIAL)
        with closing(take_lock(places.paths.run / "image-sync.lock", 0)):
            new = cache.take(places, sent, wanted)
            gone = cache.keep_only(places, wanted) if only else []
            for part in sent.iterdir() if only else ():
                shutil.rmtree(part, ignore_errors=True)
    same = tuple(name for name in wanted if name not in new)
    return SyncResult(tuple(new), same, tuple(gone))
