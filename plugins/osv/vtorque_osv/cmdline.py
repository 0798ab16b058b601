"""Put together OSv's command line: options, environment, commands. Pure.

The options are those of OSv's loader.cc. They are split at white space, with ``\\`` before a
character that stands for itself (libc/string/stresep.c); the commands are the rest.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence

from vtorque_core.api import Refusal, Refused
from vtorque_core.api_node import Address

MAX_CMDLINE = 32768  # bytes; less than half of what QEMU, libvirt and OSv were seen to take
REST_SERVER = "/libhttpserver-api.so"
CLOUD_INIT = "/usr/mgmt/cloud-init.so"

# Of the host's system or shell, or of OSv itself: they would mislead a program in the guest.
_NOT_FOR_OSV = frozenset({
    "PATH", "SHELL", "PWD", "OLDPWD", "SHLVL", "MAIL", "TERM", "LS_COLORS", "LESSOPEN",
    "LESSCLOSE", "MANPATH", "INFOPATH", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "ENV",
    "BASH_ENV", "PS1", "OSV_VERSION", "OSV_CPUS", "OSV_IP",
})  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def for_guest(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that OSv can have: no shell's own, plain names, printable ASCII.

    Those with a backslash are not among them: OSv drops it.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if name not in _NOT_FOR_OSV
        and _NAME.fullmatch(name)
        and all((" " <= c <= "~" and c != "\\") or c == "\t" for c in value)
    }


def base_options(*, run_init: bool = False) -> list[str]:
    """Return what every guest is started with.

    ``run_init``: let the image's ``/init`` run what it has; else nothing runs but the job.
    """
    options = ["--verbose", "--power-off-on-abort", "--console=serial"]
    return options if run_init else [*options, "--noinit"]


def network_options(addresses: Sequence[Address]) -> list[str]:
    """Return the static addresses; nothing where OSv shall ask DHCP.

    Raises Refused where a NIC has no address and DHCP does not say one either: OSv would wait
    for ever.
    """
    if any(address.ip is None and not address.dhcp for address in addresses):
        raise Refused(
            Refusal("OSv needs an address on each network; one here gives none", fix="ask an admin")
        )
    static = [(f"eth{i}", address) for i, address in enumerate(addresses) if address.ip is not None]
    if len(static) not in (0, len(addresses)):
        raise Refused(
            Refusal("OSv takes all its addresses from DHCP or none", fix="choose fewer networks")
        )
    options = [f"--ip={nic},{a.ip},{_mask(a.prefix)}" for nic, a in static]
    gateway = next((a.gateway for _, a in static if a.gateway), "")
    server = next((dns for _, a in static for dns in a.dns), "")
    options += [f"--defaultgw={gateway}"] if gateway else []
    return options + ([f"--nameserver={server}"] if server else [])


def mount_options(targets: Iterable[str]) -> list[str]:
    """Return the mounts of virtiofs shares, in the order of their devices."""
    return [
        f"--mount-fs=virtiofs,/dev/virtiofs{number},{target}"
        for number, target in enumerate(targets)
    ]


def assemble(options: Iterable[str], environ: Mapping[str, str], commands: str) -> str:
    """Return the whole line. Raises Refused if it is too long."""
    words = [*options, *(f"--env={name}={value}" for name, value in environ.items())]
    line = " ".join([*(escaped(word) for word in words), commands])
    if len(line) > MAX_CMDLINE:
        raise Refused(
            Refusal(
                f"OSv's command line would have {len(line)} bytes; it carries the environment too",
                limit=f"{MAX_CMDLINE} bytes",
                fix="submit with fewer variables (-v NAME instead of -V) or a shorter script",
            )
        )
    return line


def escaped(word: str) -> str:
    """Return an option as one word. A backslash cannot be said: OSv drops every one."""
    return re.sub(r"([ \t\n])", r"\\\1", word)


def _mask(prefix: int) -> str:
    return str(ipaddress.IPv4Network(f"0.0.0.0/{prefix}").netmask)
