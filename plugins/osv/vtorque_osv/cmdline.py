r"""Build OSv's kernel command line, and the script disk that it names. No I/O.

The command line consists of options (OSv's loader.cc) and ``runscript /dev/vblkN``. OSv splits the
line at white space, with ``\`` as escape character (libc/string/stresep.c). The script disk is
plain text: one line with the environment as ``--env=`` and all commands, in the syntax of
core/commands.cc. All users of a node can read QEMU's arguments, which may include the command line.
The command line contains the job's working directory and the variables that :func:`boot_line`
includes, but no other job data.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence

from vtorque_core.api import Refused
from vtorque_core.api.guest_plan import Address
from vtorque_osv.script import ProgramCall, command_line, quote_word

MAX_CMDLINE = 3584
"""Maximum length in bytes. From QEMU 7.2 on, OSv keeps 3,640 bytes of an ELF kernel's command line
(PVH)."""

MAX_SCRIPT_DISK = 65536  # bytes; tested
OUTPUT_BEGINS = ("VTORQUE_OUTPUT", "begins")
"""Name and value of the last variable. On the console, its line precedes the job's output."""

REST_SERVER = "/libhttpserver-api.so"
CLOUD_INIT = "/usr/mgmt/cloud-init.so"

# Variables of the host's system or shell, or of OSv, whose values are wrong in the guest.
_NOT_FOR_OSV = frozenset({
    "PATH", "SHELL", "PWD", "OLDPWD", "SHLVL", "MAIL", "TERM", "LS_COLORS", "LESSOPEN",
    "LESSCLOSE", "MANPATH", "INFOPATH", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "ENV",
    "BASH_ENV", "PS1", "OSV_VERSION", "OSV_CPUS", "OSV_IP",
})  # fmt: skip
_BLOCK = 4096  # bytes: a disk has whole sectors
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def guest_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for OSv: plain names, ASCII values, no host settings such as PATH."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name not in _NOT_FOR_OSV
        and _NAME.fullmatch(name)
        and all(" " <= c <= "~" or c in "\t\n" for c in value)
        and (not _has_osv_syntax(value) or not set("\\\n") & set(value))
    }


def _has_osv_syntax(value: str) -> bool:
    """Return whether OSv would change this value if the script disk contained it.

    In a variable on the script disk, OSv replaces ``$NAME``, and reads ``A?=B`` as "set A to B
    unless A is set".
    """
    return "$" in value or "?=" in value


def base_options(*, run_init: bool = False) -> list[str]:
    """Return the options of every guest.

    With ``run_init``, OSv also starts the programs in the image's ``/init``.
    """
    options = ["--verbose", "--power-off-on-abort", "--console=serial"]
    return options if run_init else [*options, "--noinit"]


def network_options(addresses: Sequence[Address]) -> list[str]:
    """Return the options for static addresses; an empty list if OSv uses DHCP.

    Raises Refused if a NIC has neither a static address nor DHCP, because OSv would wait forever.
    """
    if any(address.ip is None and not address.dhcp for address in addresses):
        raise Refused(
            "OSv needs an address on each network, but a network of this job has none",
            fix="ask an admin",
        )
    static = [(f"eth{i}", address) for i, address in enumerate(addresses) if address.ip is not None]
    if len(static) not in (0, len(addresses)):
        raise Refused(
            f"{len(static)} of the job's {len(addresses)} networks have fixed addresses and the "
            "others use DHCP; OSv does not support both together",
            fix="choose fewer networks",
        )
    options = [f"--ip={nic},{a.ip},{_mask(a.prefix)}" for nic, a in static]
    gateway = next((a.gateway for _, a in static if a.gateway), "")
    server = next((dns for _, a in static for dns in a.dns), "")
    options += [f"--defaultgw={gateway}"] if gateway else []
    return options + ([f"--nameserver={server}"] if server else [])


def mount_options(targets: Iterable[str], first: int = 0) -> list[str]:
    """Return the options that mount virtiofs shares; ``first`` is the first device number."""
    return [
        f"--mount-fs=virtiofs,/dev/virtiofs{number},{target}"
        for number, target in enumerate(targets, first)
    ]


def boot_line(options: Iterable[str], environ: Mapping[str, str], command: str) -> str:
    """Return OSv's command line. It includes each variable whose value has ``$`` or ``?=``.

    All other variables are on the script disk (:func:`script_disk`). OSv would change values with
    ``$`` or ``?=`` on that disk, but not on the command line. Raises Refused if the line is too
    long.
    """
    special = [f"--env={name}={value}" for name, value in environ.items() if _has_osv_syntax(value)]
    line = " ".join([*(escape_word(word) for word in (*options, *special)), command])
    if len(line) > MAX_CMDLINE:
        raise Refused(
            f"OSv's command line is too long ({len(line)} bytes), because it includes "
            "each variable whose value contains '$' or '?='",
            limit=f"{MAX_CMDLINE} bytes",
            fix="submit with fewer variables (-v NAME instead of -V)",
        )
    return line


def script_disk(environ: Mapping[str, str], commands: Sequence[ProgramCall]) -> bytes:
    """Return the script disk with environment and commands. Raises Refused if it is too long."""
    plain = [(name, value) for name, value in environ.items() if not _has_osv_syntax(value)]
    words = [quote_word(f"--env={name}={value}") for name, value in (*plain, OUTPUT_BEGINS)]
    text = " ".join([*words, command_line(commands)])
    if len(text) > MAX_SCRIPT_DISK:
        raise Refused(
            f"the script and its environment have {len(text)} bytes",
            limit=f"{MAX_SCRIPT_DISK} bytes",
            fix="submit with fewer variables (-v NAME instead of -V) or a shorter script",
        )
    behind = _BLOCK + -(len(text) + 1) % _BLOCK  # OSv's stdio drops the last KiB of a device
    return f"{text}\n{' ' * behind}".encode()


def escape_word(word: str) -> str:
    """Return an option as one word, with a backslash before white space.

    The option must not contain backslashes, because OSv removes all of them.
    """
    return re.sub(r"([ \t\n])", r"\\\1", word)


def _mask(prefix: int) -> str:
    return str(ipaddress.IPv4Network(f"0.0.0.0/{prefix}").netmask)
