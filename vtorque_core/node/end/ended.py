"""What plugins do when all of a job is released: after an epilogue, a reaper's round, a start's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from vtorque_core.api.children import in_child
from vtorque_core.api.kept_records import Place, place
from vtorque_core.node.end.teardown import TeardownReport
from vtorque_core.site.config import Site
from vtorque_core.site.plugins import Plugins

AFTER = 30.0  # seconds for each thing that is done after the release


def tell(site: Site, plugins: Plugins, reports: Iterable[TeardownReport | None]) -> list[str]:
    """Call ``vtorque_ended`` of each plugin, of each attempt that has nothing left; return faults.

    As root, in a child for each. The plugins are the site's of now, not the journal's: a plugin
    that was not there when the job began can keep what there is of it, but not one that was
    switched off for it.
    """
    faults = []
    for report in reports:
        if report is None or report.ended is None:
            continue
        ended = place(site.paths, report.ended.job)
        for name in plugins.names:
            if name not in report.ended.off and "vtorque_ended" in plugins.hooks_of(name):
                error = in_child(partial(_tell, plugins, name, ended, site), AFTER)
                faults += [f"plugin {name}, vtorque_ended: {error}"] if error else []
    return faults


def _tell(plugins: Plugins, name: str, ended: Place, site: Site) -> None:
    plugins.collect("vtorque_ended", only=name, place=ended, site=site)
