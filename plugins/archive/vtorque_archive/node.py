"""At the end of a job on a node: have what is kept of it written as its user. As root."""

from __future__ import annotations

from vtorque_archive.plugin import Settings
from vtorque_core.api import hookimpl
from vtorque_core.api.kept_records import Place
from vtorque_core.api.node_job import Site


@hookimpl
def vtorque_ended(place: Place, site: Site) -> None:
    """Begin to write it. Waits for nothing of the user's."""
    settings = site[Settings]
    if settings.directory:
        from vtorque_archive.send import send  # noqa: PLC0415 - a start waits for no packing

        send(place, settings)
