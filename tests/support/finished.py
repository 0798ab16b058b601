"""A checkpoint as one that was made."""

from vtorque_survive.stored import Manifest, Store


def finish(store: Store, manifest: Manifest) -> None:
    """Have what was made of it be a checkpoint."""
    store.write(manifest)
    store.finish(manifest.id)
