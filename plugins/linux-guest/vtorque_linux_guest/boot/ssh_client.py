"""Client files for ``vmgr ssh`` in the guest's run directory: the job's key and host keys.

``vmgr ssh`` runs ``ssh -F`` with ``ssh_config`` (ssh_config(5)).
"""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.job_files import File
from vtorque_linux_guest.boot import keys
from vtorque_linux_guest.guest.contract import SSH_CONFIG

KEY, KNOWN_HOSTS = "ssh_key", "ssh_known_hosts"


def client_files(guest: GuestPlan) -> Iterator[Resource]:
    """Yield, as resources, the files on the node that ``vmgr ssh`` uses to log in to the guest.

    Yields nothing if the guest has no sshd or no address.

    Only the job's user can read the key. The files of the job's first guest list all guests of the
    job, so that the user can also log in to guests that were migrated to other nodes.
    """
    address = guest.addresses[0].ip if guest.addresses else None
    if guest.image.labels.get("init") != "cloud-init" or address is None:
        return
    run = guest.run_dir
    key = keys.user_key(guest.secret).private.encode()
    reached = [(guest.hostname, address)]
    if guest.rank == 0:
        reached += [each for each in guest.peers if each[1] and each[0] != guest.hostname]
    hosts = keys.known_hosts(guest.secret, reached).encode()
    lines = (
        *(line for name, ip in reached for line in _host(name, ip)),
        "Host *",
        f"  User {guest.user.name}",
        f"  IdentityFile {run / KEY}",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {run / KNOWN_HOSTS}",
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
        # Code in a guest can request a login session (vtorque-login) on this terminal, so no key
        # may open ssh's own command line, which could forward ports of the host.
        "  EscapeChar none",
        "  ClearAllForwardings yes",
        "  ServerAliveInterval 15",  # as ~. is off: ends a session with a hung guest
        "  ServerAliveCountMax 4",
    )
    yield File(str(run / KEY), mode=0o400, reader=guest.user.uid, content=key)
    yield File(str(run / KNOWN_HOSTS), mode=0o444, content=hosts)
    yield File(str(run / SSH_CONFIG), mode=0o444, content=("\n".join(lines) + "\n").encode())


def _host(hostname: str, address: str) -> tuple[str, ...]:
    return f"Host {hostname}", f"  HostName {address}", f"  HostKeyAlias {hostname}"
