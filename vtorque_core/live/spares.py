"""Public, for a plugin's node-wide process: guests that are booted before there is a job for them.

What a spare guest is: :mod:`vtorque_core.node.start.spare`. They are the core's: a job takes one
that matches by itself, one whose memory a job needs ends, and all end when the process that keeps
them is gone. How many there are, and of which size, is that process's to say.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.base import hypervisor
from vtorque_core.base.names import Paths
from vtorque_core.base.run_tool import run_tool
from vtorque_core.records.reading import DOMAIN, SPARE, JournalState, walk
from vtorque_core.records.reading import SPARE_XML as SPARE_XML
from vtorque_core.site.load import load

_BOOT, _END = "vtorque_core.node.start.spare_boot", "vtorque_core.node.start.spare"
_MORE = 60.0  # seconds that the boot of a guest may need beside the guest's own


@dataclass(frozen=True)
class Spare:
    """A guest that no job was there for when it was booted.

    Args:
        key: its journal's name; ``name``: of its libvirt domain, empty while it has none.
        waits: it is paused, and a job may take it; ``since`` when, in Unix seconds.
        mib: memory that it holds.
        job: who has it now; empty: nobody.
        uuid, uri: of the domain, and where it is.
        directory: root's, for a note of its keeper's; it goes with the guest. The file
            ``SPARE_XML`` in it is what ``RenderedGuest.bare_xml`` of a job's guest is compared
            with.
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


def spares(paths: Paths) -> list[Spare]:
    """Return all of this node, as root. Raises JournalError."""
    held = list(walk(paths, troubled=lambda *_: None))
    jobs = {str(r.args["key"]): s.header.job.id for s in held for r in s.open if r.kind == SPARE}
    return [_spare(s, paths, jobs.get(s.key, "")) for s in held if s.header.spare]


def _spare(state: JournalState, paths: Paths, job: str) -> Spare:
    marks = [mark for mark in state.phases if mark.guest is None]
    domains = [r.args for r in state.open if r.kind == DOMAIN]
    of_it = {name: str(domains[-1][name]) if domains else "" for name in ("name", "uuid", "uri")}
    return Spare(
        key=state.key,
        waits=bool(domains) and marks[-1].name == SPARE,
        since=marks[-1].time if marks else 0.0,
        mib=sum(int(lease.args["mib"]) for lease in state.leases),
        job=job,
        directory=paths.job_state(state.key) / "g0",
        **of_it,
    )


def dead(spare: Spare) -> bool:
    """Return whether its domain is gone, as after a reboot. As root. Raises HostFault."""
    return not hypervisor.domain_runs(spare.uri, spare.uuid)


def boot(config: Path, keeper: str, ports: int, wanted: Mapping[str, str]) -> str:
    """Boot one, in a process of its own; return its key when it waits. As root.

    Args:
        config: the site config.
        keeper: the ``name`` of the NodeProcess that keeps it.
        ports: devices that can be plugged in.
        wanted: ``-vm`` keys and values: img, vcpus, ram.

    Raises HostFault: the node has no room, or it is not to be had; nothing is left then.
    """
    site, _ = load(config, node=False)
    words = (f"{key}={value}" for key, value in wanted.items())
    program = (sys.executable, "-I", "-m", _BOOT, str(config), keeper, str(ports), *words)
    return run_tool(*program, timeout=site.node.start_timeout + _MORE).strip()


def end(paths: Paths, key: str) -> bool:
    """End one, in a process of its own, unless a job has it; return whether it has gone. As root.

    Raises HostFault if something of it is left.
    """
    program = (sys.executable, "-I", "-m", _END, str(paths.state), str(paths.run), key)
    return run_tool(*program).strip() == "ended"
