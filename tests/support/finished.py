"""Create the files of a completed checkpoint."""

from pathlib import Path

from vtorque_survive.stored import Manifest, SavedGuest, Store


def finish(store: Store, manifest: Manifest) -> None:
    """Make a complete checkpoint of the prepared files."""
    store.write(manifest)
    store.finish(manifest.id)


def saved_guest(uuid: str, leased: tuple[tuple[str, str], ...] = ()) -> SavedGuest:
    """Return a guest of a job that was saved."""
    was, memory = (Path("/s/g0"), Path("/r/g0")), Path("/c/g0.memory")
    return SavedGuest("vt-42.srv.0-n1-0", uuid, "vn1", "42.srv", 0, leased, *was, memory)
