"""A guest's seed (doc/guests.md), and the files on the node for ``vmgr ssh``. Privileges: root."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from vtorque_core.api import HostFault, run_tool
from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_context import ContextItem, LinePort, Mount
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.job_files import File
from vtorque_linux_guest.boot import cloud_config, cloud_init, setup_script
from vtorque_linux_guest.boot.seed import SEED_NAME, Seed, iso
from vtorque_linux_guest.boot.ssh_client import client_files
from vtorque_linux_guest.guest import agent_side
from vtorque_linux_guest.guest.contract import CANCEL_MARKER, CANCEL_PORT, EPILOGUE_MARKER
from vtorque_linux_guest.guest.linux_family import boots_micro, has_agent
from vtorque_linux_guest.settings import Settings, agent_path, site_scripts

_RESOLVE = 5.0  # seconds for realpath(1); if a file system hangs, the start continues
# In these directories a link to a user's directory would give that user root in the guest.
_SYSTEM = re.compile(r"/(bin|boot|dev|etc|lib[^/]*|proc|root|run|sbin|sys|usr|var(?!/home/))(/|$)")
_CANCEL = "vtorque/cancel.conf"


def resources(
    guest: GuestPlan, items: Sequence[ContextItem], settings: Settings
) -> Iterable[Resource]:
    """Return the seed, and the files on the node that ``vmgr ssh`` uses to log in to the guest.

    If the guest runs commands when the job is canceled, also return the marker file for this.
    Raises Refused or HostFault if the guest does not support a context item.
    """
    files = seed_files(guest, items, settings, find_aliases(guest))
    has_epilogue = bool(site_scripts(settings.epilogue))
    marker = str(guest.run_dir / EPILOGUE_MARKER) if has_epilogue else ""
    path = str(guest.state_dir / SEED_NAME)
    found = [Seed(path, guest.qemu_uid, marker, iso(files)), *client_files(guest)]
    if _CANCEL in files:
        found.append(File(str(guest.run_dir / CANCEL_MARKER), mode=0o444))
    return found


def find_aliases(guest: GuestPlan) -> dict[str, str]:
    """Map the path of each link in the guest to the shared directory that the link leads to.

    The guest gets links at these paths:

    - the home's path in the user database,
    - the home's path without symbolic links, as returned by getcwd(3),
    - for each share whose path is equal on node and guest, this path without symbolic links.

    realpath(1) runs as the user, because an NFS server may answer only that user. If it fails, no
    links are resolved. Users can control the result by replacing a directory with a link, so paths
    in system directories are dropped.
    """
    aliases = {
        s.source: s.target for s in guest.shares if s.source == s.target and s.name != "home"
    }
    homes = [s for s in guest.shares if s.name == "home" and s.kind == "virtiofs"]
    aliases |= {path: s.target for s in homes for path in (guest.user.home, s.source)}
    uid = guest.user.uid if os.geteuid() == 0 else None
    with contextlib.suppress(HostFault):
        output = run_tool("realpath", "-mz", "--", *aliases, timeout=_RESOLVE, uid=uid)
        resolved = zip(output.split("\0"), aliases.values(), strict=False)
        aliases |= {path: target for path, target in resolved if not _SYSTEM.match(path)}
    return {path: target for path, target in aliases.items() if path != target}


def seed_files(
    guest: GuestPlan,
    items: Sequence[ContextItem],
    settings: Settings,
    links: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Return the contents of the seed's files, by path. Raises Refused and HostFault."""
    fragments = cloud_config.fragments(guest.image, settings)
    setup = setup_script.build(
        guest,
        items,
        settings,
        prologue=site_scripts(settings.prologue),
        epilogue=site_scripts(settings.epilogue),
        cloud_config=bool(fragments),
        links=links,
    )
    found = {f"vtorque/{path}": content for path, content in setup.items()}
    found["vtorque/agent.conf"] = agent_conf(guest, items)
    if guest.source.warm_key:  # so that no key derives from random bytes from before the job
        found["vtorque/random"] = os.urandom(64)
    if setup_script.cancel_commands(guest, items):
        found[_CANCEL] = cancel_conf(guest)
    if boots_micro(guest.image):
        return found
    found |= cloud_init.config_files(guest, fragments)
    if not has_agent(guest.image):
        found["vtorque/vtorque-agent"] = _agent_binary(guest, settings)
    return found


def agent_conf(guest: GuestPlan, items: Sequence[ContextItem]) -> bytes:
    """Return the agent's configuration (doc/stream.md).

    The agent syncs before it reports a job's end, unless the job uses only virtiofs and the root
    disk: virtiofs needs no flush after a close, and the root disk is discarded.
    """
    own = any(isinstance(item, Mount) and item.kind != "virtiofs" for item in items)
    values = {"setup": "/run/vtorque/setup.sh", "sync": str(int(own))}
    lines = [item for item in items if isinstance(item, LinePort)]
    if len(lines) > 1:
        both = f"{lines[0].path} and {lines[1].path}"
        raise HostFault(f"two plugins request a LinePort, but a guest has only one: {both}")
    for item in lines:
        values |= {"lines": item.path, "lines_port": f"port:{item.port}"}
    return agent_side.agent_conf(guest, values)


def cancel_conf(guest: GuestPlan) -> bytes:
    """Return the configuration of the guest's second agent, which runs commands on cancellation.

    Plugins provide the commands (``CancelCommand``). The first agent runs the job.
    """
    return agent_side.conf(agent_side.common_keys(guest) | {"run": f"port:{CANCEL_PORT}"})


def _agent_binary(guest: GuestPlan, settings: Settings) -> bytes:
    path = agent_path(settings, guest.image.arch)
    try:
        return path.read_bytes()
    except OSError as error:
        raise HostFault(
            f"image {guest.image.name} contains no guest agent, and the agent {path} cannot be "
            f"read: {error.strerror}; set agent in [plugin.linux-guest]"
        ) from None
