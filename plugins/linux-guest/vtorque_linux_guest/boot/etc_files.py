"""Contents of the files that every guest gets: users, hosts, ssh and login shells.

The guest's shells interpret only the text of :func:`profile_text`, in which all values are quoted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from vtorque_core.api import HostFault
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_linux_guest.boot import keys
from vtorque_linux_guest.guest.contract import ENVIRONMENT, SPOOL
from vtorque_linux_guest.guest.environment import environment_text, is_of_job


def passwd_line(user: JobUser, home: str, shell: str) -> str:
    """Return the user's line of passwd(5). Raises HostFault for an invalid value."""
    parts = (user.name, "x", str(user.uid), str(user.gid), "", home, shell)
    return ":".join(field_text(p) for p in parts) + "\n"


def shadow_line(user: JobUser) -> str:
    """Return the user's line of shadow(5): ``*`` disables passwords but not ssh keys (sshd(8))."""
    return f"{field_text(user.name)}:*:::::::\n"


def group_lines(user: JobUser) -> str:
    """Return group(5) lines of all the user's groups, primary group first."""
    return "".join(
        f"{field_text(name)}:x:{gid}:{'' if gid == user.gid else user.name}\n"
        for name, gid in user.groups
    )


def field_text(value: str) -> str:
    """Return a value of passwd(5) or group(5) unchanged. Raises HostFault if it is invalid."""
    if any(c in value for c in ":\n\r\0"):
        raise HostFault(
            f"user database: {value!r} is not allowed in a guest's passwd or group file"
        )
    return value


def hosts_text(guest: GuestPlan) -> str:
    """Return hosts(5): the job's guests in each network, and its nodes without guests."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{ip} {name}" for name, ip in guest.peers if ip]
    lines += [f"{ip} {name}" for name, _, ip in guest.aliases if ip]
    lines += [f"{node.address} {node.name}" for node in guest.bare if node.address]
    if guest.hostname not in {name for name, ip in guest.peers if ip}:
        lines.append(f"127.0.1.1 {guest.hostname}")
    return "".join(f"{line}\n" for line in lines)


def resolv_text(guest: GuestPlan) -> str:
    """Return resolv.conf(5), which may be empty."""
    servers = dict.fromkeys(s for address in guest.addresses for s in address.dns)
    domains = dict.fromkeys(d for address in guest.addresses for d in address.search)
    search = f"search {' '.join(domains)}\n" if domains else ""
    return search + "".join(f"nameserver {s}\n" for s in servers)


def profile_text(variables: Mapping[str, str]) -> str:
    """Return /etc/profile.d/vtorque.sh, which sets the running job's variables, or ``variables``.

    ``variables`` may include some that the job does not get (``EnvVar.unless``). The user can
    change the file of the job's variables, so only the user's own shells read it.
    """
    path = f"{SPOOL}/{ENVIRONMENT}"
    of_job = sorted(name for name in variables if is_of_job(name))
    forget = f"unset {' '.join(of_job)}; " if of_job else ""
    text = f"if [ -O {path} ] && [ -r {path} ]; then {forget}. {path}; fi\n"
    return environment_text(variables) + text


def sudoers_text(uid: int, *, allow: bool = False) -> str:
    """Return a sudoers(5) rule: ``uid`` may run all commands or, without ``allow``, none."""
    return f"#{uid} ALL=(ALL:ALL) {'NOPASSWD: ALL' if allow else '!ALL'}\n"


def sshd_text() -> str:
    """Return sshd_config(5) lines that precede and therefore override the image's own lines."""
    return (
        "# vTorque: the job's user with the job's key, nobody else, nothing else\n"
        f"AuthorizedKeysFile {keys_directory('%u')}/authorized_keys\n"
        "PermitRootLogin no\n"
        "PasswordAuthentication no\n"
        "PermitEmptyPasswords no\n"
        "ChallengeResponseAuthentication no\n"
    )


def ssh_text(guest: GuestPlan) -> str:
    """Return ssh_config(5) lines for logins between the job's guests."""
    known = (*_peers(guest), *((name, ip) for name, _, ip in guest.aliases))
    names = dict.fromkeys(word for peer in known for word in peer if word)
    return (
        f"Host {' '.join(names)}\n"
        f"    IdentityFile {keys_directory('%u')}/id_ed25519\n"
        "    StrictHostKeyChecking yes\n"
        # A guest is READY before its sshd listens. ssh retries once a second.
        "    ConnectionAttempts 30\n"
    )


def ssh_files(guest: GuestPlan) -> Iterable[tuple[str, str, int, bool]]:
    """Yield each ssh file as (path, text, mode, True if the job's user owns the file)."""
    own = keys_directory(guest.user.name)
    known = keys.known_hosts(guest.secret, _peers(guest), guest.aliases)
    yield f"{own}/authorized_keys", keys.authorized_keys(guest.secret), 0o644, False
    yield f"{own}/id_ed25519", keys.user_key(guest.secret).private, 0o600, True
    yield "/etc/ssh/ssh_known_hosts", known, 0o644, False
    yield "/etc/ssh/ssh_config.d/50-vtorque.conf", ssh_text(guest), 0o644, False


def keys_directory(user: str) -> str:
    """Return the directory of a user's job keys. It is not ~/.ssh, which the user's jobs share."""
    return str(PurePosixPath("/etc/vtorque/ssh") / user)


def _peers(guest: GuestPlan) -> tuple[tuple[str, str], ...]:
    if guest.hostname in {name for name, _ in guest.peers}:
        return guest.peers
    return (*guest.peers, (guest.hostname, ""))
