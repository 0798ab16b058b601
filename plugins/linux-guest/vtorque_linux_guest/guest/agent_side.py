"""The configuration and the ports of a guest's agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vtorque_core.api import HostFault
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import Channel
from vtorque_linux_guest.guest.contract import (
    RUN_PORT,
    RUN_SOCKET,
    SPOOL,
    STATUS_PORT,
    STATUS_SOCKET,
)
from vtorque_linux_guest.guest.linux_family import guest_root


def ports(guest: GuestPlan) -> Iterator[Channel]:
    """Yield the virtio-serial ports that connect the host with the agent."""
    yield Channel("status", STATUS_PORT, str(guest.run_dir / STATUS_SOCKET), owner="root")
    yield Channel("run", RUN_PORT, str(guest.run_dir / RUN_SOCKET), owner="job")


def agent_conf(guest: GuestPlan, more: Mapping[str, str]) -> bytes:
    """Return the agent's configuration, including the values in ``more``.

    Raises HostFault for a value that contains a newline or a NUL.
    """
    found = {"status": f"port:{STATUS_PORT}", "run": f"port:{RUN_PORT}", **more}
    return conf({**common_keys(guest), **found})


def common_keys(guest: GuestPlan) -> dict[str, str]:
    """Return the configuration that the guest's agents share: the job's user and directories."""
    user = guest.user
    values = {
        "user": user.name,
        "uid": str(user.uid),
        "gid": str(user.gid),
        "groups": ",".join(str(gid) for gid in dict.fromkeys(gid for _, gid in user.groups)),
        "home": guest.home,
        "shell": user.shell,
        "spool": SPOOL,
    }
    if "container" in guest.image.labels:  # of an image made from a container
        values["container"] = guest.image.labels["container"]
    if guest_root(guest.image) == "user":
        values["root"] = "1"
    return values


def home(guest: GuestPlan) -> str:
    """Return the user's home directory in the guest."""
    return guest.home


def conf(values: Mapping[str, str]) -> bytes:
    """Return keys and values in the format of agent.conf. Raises HostFault."""
    for key, value in values.items():
        if any(c in value for c in "\n\0"):
            raise HostFault(
                f"{key} {value!r} of the job's user contains characters that cannot be "
                "passed to a guest"
            )
    text = "".join(f"{key}={value}\n" for key, value in values.items())
    return text.encode("utf-8", "surrogateescape")
