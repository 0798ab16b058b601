"""Recreate resources from their journal, as another process does."""

import dataclasses
import shutil
from pathlib import Path

from vtorque_core.api.acquired import Resource
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, read, reconstruct
from vtorque_core.resources.kinds import core_kind


def through_the_journal(resource: Resource, tmp_path: Path) -> Resource:
    """Return the resource as another process gets it from the journal."""
    quiet = type(resource.kind, (type(resource),), {"create": lambda self: None})
    copy = quiet(**{f.name: getattr(resource, f.name) for f in dataclasses.fields(resource)})
    paths = Paths(tmp_path / "js", tmp_path / "jr")
    shutil.rmtree(paths.state, ignore_errors=True)
    with Journal.start(paths, JobHeader(JobAttempt("1", 0, "u", 1), "local")) as journal:
        journal.acquire(copy, plugin="core", phase="x")
        record = read(journal.path).open[0]
        return reconstruct(record, core_kind(record.kind))
