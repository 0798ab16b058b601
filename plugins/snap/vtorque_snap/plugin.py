"""``-vm snap=true``: Snap collects metrics while the job runs. Which, and where: the site's."""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import Option, boolean, hookimpl
from vtorque_core.api_options import show_boolean

SNAP = Option("snap", boolean, False, "collect metrics of the job with Snap", "BOOL", show_boolean)


@hookimpl
def vtorque_options() -> Iterator[Option[bool]]:
    """Yield the key."""
    yield SNAP
