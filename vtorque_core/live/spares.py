"""Boot and end warm guests.

The core ends a warm guest if a job needs the guest's memory, or when the process of the guest's
plugin has ended.

Privileges: root.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.base import hypervisor
from vtorque_core.base.names import Paths
from vtorque_core.base.run_tool import run_tool
from vtorque_core.config.load import load
from vtorque_core.records.reading import DOMAIN, SPARE, JournalState, walk
from vtorque_core.records.reading import SPARE_XML as SPARE_XML

_BOOT, _END = "vtorque_core.node.start.spare_boot", "vtorque_core.node.start.spare"
_MORE = 60.0  # seconds in addition to [node] start_timeout


@dataclass(frozen=True)
class WarmGuest:
    """A warm guest, which has booted before its job.

    Attributes:
        key: name of its journal.
        name, uuid, uri: identify the libvirt domain; empty before it exists.
        waits: True if it is paused and a job may claim it.
        since: Unix time at which its current phase began.
        mib: leased memory.
        job: id of the job that has claimed it; empty: none.
        directory: root-owned directory for the plugin's notes. If its file ``SPARE_XML`` equals
            ``RenderedGuest.bare_xml``, the warm guest fits the job.
    """

    key: str
    name: str
    waits: bool
    since: float
    mib: int
    job: str
    uuid: str
    uri: str
    directory: Path


def warm_guests(paths: Paths) -> list[WarmGuest]:
    """Return all warm guests of this node whose journals are readable."""
    held = list(walk(paths, troubled=lambda *_: None))
    jobs = {str(r.args["key"]): s.header.job.id for s in held for r in s.open if r.kind == SPARE}
    return [_spare(s, paths, jobs.get(s.key, "")) for s in held if s.header.spare]


def _spare(state: JournalState, paths: Paths, job: str) -> WarmGuest:
    marks = [mark for mark in state.phases if mark.guest is None]
    domains = [r.args for r in state.open if r.kind == DOMAIN]
    of_it = {name: str(domains[-1][name]) if domains else "" for name in ("name", "uuid", "uri")}
    return WarmGuest(
        key=state.key,
        waits=bool(domains) and marks[-1].name == SPARE,
        since=marks[-1].time if marks else 0.0,
        mib=sum(int(lease.args["mib"]) for lease in state.leases),
        job=job,
        directory=paths.job_state(state.key) / "g0",
        **of_it,
    )


def has_ended(spare: WarmGuest) -> bool:
    """Return True if a warm guest's domain no longer exists. Raises HostFault."""
    return not hypervisor.domain_runs(spare.uri, spare.uuid)


def boot(config: Path, keeper: str, ports: int, wanted: Mapping[str, str]) -> str:
    """Boot a warm guest in a separate process; return its key when it waits for a job.

    ``keeper`` is the ``name`` of the plugin's NodeProcess, ``ports`` the number of devices that a
    job can attach. ``wanted`` has the values of the ``-vm`` keys img, vcpus and ram. Raises
    HostFault if the boot fails; all resources are then released.
    """
    site, _ = load(config, node=False)
    words = (f"{key}={value}" for key, value in wanted.items())
    program = (sys.executable, "-I", "-m", _BOOT, str(config), keeper, str(ports), *words)
    return run_tool(*program, timeout=site.node.start_timeout + _MORE).strip()


def end(paths: Paths, key: str) -> bool:
    """End a warm guest in a separate process. Return False if a job has claimed it.

    Raises HostFault if resources remain.
    """
    program = (sys.executable, "-I", "-m", _END, str(paths.state), str(paths.run), key)
    return run_tool(*program).strip() == "ended"
