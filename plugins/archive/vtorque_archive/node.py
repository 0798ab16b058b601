"""Start a process that archives a job's records when the job ends on a node. Privileges: root."""

from __future__ import annotations

from vtorque_archive.plugin import Settings
from vtorque_core.api import hookimpl
from vtorque_core.api.kept_records import Place
from vtorque_core.api.node_job import Site


@hookimpl
def vtorque_job_ended(place: Place, site: Site) -> None:
    """Start a process that writes the archive, and return without waiting for it."""
    settings = site[Settings]
    if settings.directory:
        from vtorque_archive.send import send  # noqa: PLC0415 - starts need no packing

        send(place, settings)
