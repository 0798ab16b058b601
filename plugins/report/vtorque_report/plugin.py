"""``vmgr report``, and optionally its summary at the end of a job's standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtorque_core.api import Command, Remote, constant_hook, hookimpl, setting

if TYPE_CHECKING:
    from vtorque_core.api.kept_records import Place
    from vtorque_core.api.node_job import Site


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.report]``."""

    show: bool = setting(
        False, doc="append the summary of vmgr report to each job's standard error"
    )


vtorque_settings = constant_hook(Settings)


@hookimpl
def vtorque_after_script(place: Place, code: int, site: Site) -> Iterator[Sequence[str]]:
    """Yield the command that prints the summary, if ``show`` is set."""
    if site[Settings].show:
        directory = os.fspath(place.directory)
        yield [sys.executable, "-I", "-m", "vtorque_report", directory, str(code)]


vtorque_commands = constant_hook(
    Command("vmgr report", "vtorque_report.command:report", Remote(("as_json",), output="html"))
)
