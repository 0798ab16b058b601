"""What the host tells the agent of a guest, and by which ports. Pure."""

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


def ports(guest: GuestPlan) -> Iterator[Channel]:
    """Yield the virtio-serial ports over which the host talks with the agent."""
    yield Channel("status", STATUS_PORT, str(guest.run_dir / STATUS_SOCKET), owner="root")
    yield Channel("run", RUN_PORT, str(guest.run_dir / RUN_SOCKET), owner="job")


def agent_conf(guest: GuestPlan, more: Mapping[str, str]) -> bytes:
    """Return the agent's configuration: who runs jobs, where, by which ports, and ``more`` keys.

    Raises HostFault for a value that no line can hold.
    """
    found = {"status": f"port:{STATUS_PORT}", "run": f"port:{RUN_PORT}", **more}
    return conf({**who_and_where(guest), **found})


def who_and_where(guest: GuestPlan) -> dict[str, str]:
    """Return what each agent of the guest is told: whose programs it runs, and where."""
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
    return values


def home(guest: GuestPlan) -> str:
    """Return the user's home in the guest."""
    return guest.home


def conf(values: Mapping[str, str]) -> bytes:
    """Return an agent's configuration of these keys. Raises HostFault."""
    for key, value in values.items():
        if any(c in value for c in "\n\0"):
            raise HostFault(f"{key} {value!r} of the job's user cannot be told to a guest")
    text = "".join(f"{key}={value}\n" for key, value in values.items())
    return text.encode("utf-8", "surrogateescape")
