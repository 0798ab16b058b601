"""The contents of a guest's seed (doc/guests.md). As root, on the node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from vtorque_core.api import HostFault
from vtorque_core.api.guest_context import ContextItem, LinePort, Mount
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_linux_guest.boot import cloud_config, cloud_init, setup_script
from vtorque_linux_guest.guest import agent_side
from vtorque_linux_guest.guest.contract import CANCEL_PORT
from vtorque_linux_guest.guest.linux_family import boots_micro, has_agent
from vtorque_linux_guest.settings import Settings, agent_path, site_scripts


def seed_files(
    guest: GuestPlan,
    items: Sequence[ContextItem],
    settings: Settings,
    links: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Return the seed's files: path to content. Raises Refused and HostFault."""
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
    if (
        guest.source.warm_key
    ):  # otherwise its keys would derive from random bytes from before the job
        found["vtorque/random"] = os.urandom(64)
    if setup_script.cancel_commands(guest, items):
        found["vtorque/cancel.conf"] = cancel_conf(guest)
    if boots_micro(guest.image):
        return found
    found["user-data"] = cloud_init.user_data(guest, fragments)
    found["meta-data"] = cloud_init.meta_data(guest)
    found["network-config"] = cloud_init.network_config(guest)
    if not has_agent(guest.image):
        found["vtorque/vtorque-agent"] = _agent_binary(guest, settings)
    return found


def agent_conf(guest: GuestPlan, items: Sequence[ContextItem]) -> bytes:
    """Return the agent's configuration (doc/stream.md).

    The configuration includes whether the agent syncs before it reports the end of a job. Only some
    file systems need that: virtiofs needs no flush after a close, and the root disk is discarded.
    """
    own = any(isinstance(item, Mount) and item.kind != "virtiofs" for item in items)
    values = {"setup": "/run/vtorque/setup.sh", "sync": str(int(own))}
    lines = [item for item in items if isinstance(item, LinePort)]
    if len(lines) > 1:
        raise HostFault(f"two plugins request a line port: {lines[0].path} and {lines[1].path}")
    for item in lines:
        values |= {"lines": item.path, "lines_port": f"port:{item.port}"}
    return agent_side.agent_conf(guest, values)


def cancel_conf(guest: GuestPlan) -> bytes:
    """Return the configuration of the agent that runs the cancellation commands."""
    return agent_side.conf(agent_side.common_keys(guest) | {"run": f"port:{CANCEL_PORT}"})


def _agent_binary(guest: GuestPlan, settings: Settings) -> bytes:
    path = agent_path(settings, guest.image.arch)
    try:
        return path.read_bytes()
    except OSError as error:
        raise HostFault(
            f"image {guest.image.name} has no agent (label agent=builtin) and {path} cannot be "
            f"read: {error.strerror}; set agent in [plugin.linux-guest]"
        ) from None
