"""Generate ``setup.sh``, which the agent runs as root before READY.

All Linux guests use the same script. Every value is quoted by :func:`shlex.quote` or stored as a
file on the seed. The script consists of named steps. If a step fails, its output becomes the
error message of the boot.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TypeVar

from vtorque_core.api import HostFault, Refused
from vtorque_core.api.guest_context import (
    CancelCommand,
    ContextItem,
    EnvVar,
    GuestDevice,
    GuestFile,
    KernelModule,
    Mount,
    Package,
    PciMemory,
    RootCommand,
)
from vtorque_core.api.guest_plan import Address, GuestPlan
from vtorque_linux_guest.boot import etc_files
from vtorque_linux_guest.guest.contract import EPILOGUE_CLIENT, ON_CANCEL, ON_GUEST, SITE, SPOOL
from vtorque_linux_guest.guest.linux_family import (
    DEBIAN,
    MICRO,
    REDHAT,
    boots_micro,
    family,
    guest_root,
    has_agent,
)
from vtorque_linux_guest.settings import Settings, SiteScript

Item = TypeVar("Item", bound=ContextItem)

_SMALL = 4096  # maximum bytes of a file that the script itself contains
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_:-]*", re.ASCII)
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{4}", re.ASCII)


@dataclass
class _Script:
    """The script under construction. ``seed`` maps paths below ``vtorque/`` to contents."""

    lines: list[str] = field(default_factory=list)
    seed: dict[str, bytes] = field(default_factory=dict)
    puts: int = 0

    def step(self, name: str) -> None:
        shown = "".join(c if c.isprintable() else "?" for c in name)[:150]
        self.lines.append(f"\nstep {quote(shown)}")

    def call(self, *words: str) -> None:
        """Add a command whose words are already quoted for the shell."""
        self.lines.append(" ".join(words))

    def write(self, path: str, text: str) -> None:
        """Add a line that writes a small file without starting a process."""
        self.call("printf %s", quote(text), f">{guest_path(path)}")

    def put(self, path: str, content: bytes, mode: int = 0o644, owner: str = "0:0") -> None:
        """Add a line that writes a file, and store the file's content on the seed."""
        number = self.file(content)
        self.call("put", number, guest_path(path), f"{mode & 0o7777:04o}", owner)

    def file(self, content: bytes) -> str:
        number = f"{self.puts:04d}"
        self.puts += 1
        self.seed[f"files/{number}"] = content
        return number


def quote(value: str) -> str:
    """Return ``value`` as one word of shell text. Raises HostFault if it contains a NUL."""
    if "\0" in value:
        raise HostFault(f"{value!r} has a NUL character: it cannot be used in a guest")
    return shlex.quote(value)


def guest_path(path: str) -> str:
    """Return an absolute guest path as shell text, with the script's variable ``R`` as prefix.

    Raises HostFault for a relative path or ``..``.
    """
    if not path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise HostFault(f"{path!r} must be an absolute path in the guest, without '..'")
    return '"$R"' + quote(path)


def build(
    guest: GuestPlan,
    items: Sequence[ContextItem],
    settings: Settings,
    prologue: Sequence[SiteScript] = (),
    epilogue: Sequence[SiteScript] = (),
    *,
    cloud_config: bool = False,
    links: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Return the contents of the setup's files on the seed, by path below ``vtorque/``.

    ``cloud_config`` is true if the image or the site has a cloud-config file. ``links`` is the
    result of ``seed_contents.find_aliases``. Raises Refused for an item that the image's family
    does not support, HostFault for an invalid value.
    """
    script = _Script()
    micro = boots_micro(guest.image)
    if micro:
        _base(script, guest)
    else:
        _addresses(script, guest)
    _identity(script, guest)
    _files(script, guest, _items_of_kind(items, GuestFile))
    _environment(script, _items_of_kind(items, EnvVar))
    if not micro:
        _ssh(script, guest)
    _packages(script, guest, _items_of_kind(items, Package), settings)
    _modules(script, _items_of_kind(items, KernelModule))
    _commands(script, (c for c in _items_of_kind(items, RootCommand) if c.stage == "boot"))
    _mounts(script, guest, _items_of_kind(items, Mount))
    _links(script, guest, links, _items_of_kind(items, Mount))
    _devices(script, guest, _items_of_kind(items, GuestDevice))
    _pci_memory(script, guest, _items_of_kind(items, PciMemory))
    if cloud_config:
        script.step("cloud-config")
        script.call("cloud_config", "modules" if has_agent(guest.image) else "schema")
    _site_scripts(script, guest, prologue, epilogue)
    _add_cancel_agent(script, cancel_commands(guest, items))
    _commands(script, (c for c in _items_of_kind(items, RootCommand) if c.stage == "ready"))
    _passwd(script, guest.user.shell)  # a package or script may have installed it
    text = "#!/bin/sh\nR=''\n" + _data("setup_lib.sh") + "\n".join(script.lines) + "\n"
    return {"setup.sh": text.encode("utf-8", "surrogateescape"), **script.seed}


def _items_of_kind(items: Iterable[ContextItem], kind: type[Item]) -> list[Item]:
    return [item for item in items if isinstance(item, kind)]


def _data(name: str) -> str:
    return files("vtorque_linux_guest.guest").joinpath(name).read_text("utf-8")


def _owner(guest: GuestPlan, owner: str) -> str:
    return f"{guest.user.uid}:{guest.user.gid}" if owner == "job" else "0:0"


def _base(script: _Script, guest: GuestPlan) -> None:
    """Configure host name, network and time in an image without cloud-init."""
    script.step("host name")
    script.write("/proc/sys/kernel/hostname", guest.hostname)
    script.write("/etc/hostname", guest.hostname + "\n")
    for address in guest.addresses:
        script.step(f"network {address.network} {_address_text(address)}".replace("  ", " "))
        _network(script, address)
    if any(address.ip and not address.network for address in guest.addresses):
        script.write("/etc/resolv.conf", etc_files.resolv_text(guest))
    if guest.ntp:
        script.step("time servers")
        # Debian's busybox has no ntpd; the guest then keeps the host's clock, which it booted with.
        servers = " ".join(f"-p {quote(server)}" for server in guest.ntp)
        script.call(f"if command -v ntpd >/dev/null; then run ntpd {servers}; fi")


def _addresses(script: _Script, guest: GuestPlan) -> None:
    """Add commands that wait until cloud-init has configured the network."""
    for address in guest.addresses:
        if address.ip or address.dhcp:
            script.step(f"network {address.network} {_address_text(address)}".replace("  ", " "))
            script.call("find_nic", quote(address.mac.lower()))
            script.call("await_address")


def _address_text(address: Address) -> str:
    return address.ip or ("by DHCP" if address.dhcp else "without an address")


def _network(script: _Script, address: Address) -> None:
    script.call("find_nic", quote(address.mac.lower()))
    mtu = f" mtu {int(address.mtu)}" if address.mtu else ""
    script.call(f'run ip link set dev "$NIC"{mtu} up')
    if address.ip is None:
        if address.dhcp:
            _dhcp(script, address)
        return
    script.call("run ip addr add", quote(f"{address.ip}/{address.prefix}"), 'dev "$NIC"')
    if address.gateway:
        metric = f" metric {int(address.metric)}" if address.metric else ""
        route = "run ip route add default via"
        script.call(route, quote(address.gateway), f'dev "$NIC"{metric}')


def _dhcp(script: _Script, address: Address) -> None:
    script.seed["udhcpc.sh"] = _data("udhcpc.sh").encode()
    script.call('chmod 0700 "$D/udhcpc.sh"')
    script.call("export VTORQUE_ADDRESS_ONLY=" + ("1" if address.network else ""))
    script.call('run udhcpc -i "$NIC" -n -t 10 -T 1 -s "$D/udhcpc.sh"')
    script.call("unset VTORQUE_ADDRESS_ONLY")


def _identity(script: _Script, guest: GuestPlan) -> None:
    """Create the job's user with the same ids in every image."""
    user, home = guest.user, guest.home
    script.step(f"user {user.name}")
    texts = {
        "passwd": etc_files.passwd_line(user, home, user.shell),
        "passwd.sh": etc_files.passwd_line(user, home, "/bin/sh"),
        "shadow": etc_files.shadow_line(user),
        "group": etc_files.group_lines(user),
    }
    for name, text in texts.items():
        script.seed[f"ids/{name}"] = text.encode("utf-8", "surrogateescape")
    script.call('ids "$D/ids/group"', guest_path("/etc/group"), "022")
    _passwd(script, user.shell)
    script.call('ids "$D/ids/shadow"', guest_path("/etc/shadow"), "077")
    allow = guest_root(guest.image) == "both"
    sudoers = script.file(etc_files.sudoers_text(user.uid, allow=allow).encode())
    script.call(
        f"if [ -d {guest_path('/etc/sudoers.d')} ];",
        f"then put {sudoers} {guest_path('/etc/sudoers.d/zz-vtorque')} 0440 0:0; fi",
    )
    script.call("folder", guest_path(SPOOL))
    script.step("hosts")
    script.write("/etc/hosts", etc_files.hosts_text(guest))


def _passwd(script: _Script, shell: str) -> None:
    """Write the user's line of passwd(5), with /bin/sh if the guest lacks the login shell.

    All programs, including the agent and sshd, read the login shell from that line.
    """
    script.call(f"passwd=passwd; if [ ! -x {guest_path(shell)} ]; then passwd=passwd.sh; fi")
    script.call('ids "$D/ids/$passwd"', guest_path("/etc/passwd"), "022")


def _files(script: _Script, guest: GuestPlan, items: Iterable[GuestFile]) -> None:
    executable = []
    for item in items:
        script.step(f"file {item.path}")
        plain = item.mode in (0o644, 0o755) and item.owner == "root"
        if plain and _is_small_text(item.content):
            script.call("text", guest_path(item.path), quote(item.content.decode("ascii")))
            if item.mode == 0o755:
                executable.append(guest_path(item.path))
        else:
            script.put(item.path, item.content, item.mode, _owner(guest, item.owner))
    if executable:  # one process for all: in an emulated guest each takes 25 ms
        script.call("chmod", "0755", *executable)


def _is_small_text(content: bytes) -> bool:
    return len(content) <= _SMALL and content.isascii() and b"\0" not in content


def _environment(script: _Script, items: Iterable[EnvVar]) -> None:
    script.step("environment")
    script.call("folder", guest_path("/etc/profile.d"))
    text = etc_files.profile_text({item.name: item.value for item in items})
    script.write("/etc/profile.d/vtorque.sh", text)


def _ssh(script: _Script, guest: GuestPlan) -> None:
    script.step("ssh")
    for path, text, mode, users in etc_files.ssh_files(guest):
        script.put(path, text.encode(), mode, _owner(guest, "job" if users else "root"))
    script.put(ON_GUEST, _data("on-guest").encode(), 0o755)
    script.call("ssh_settings", script.file(etc_files.sshd_text().encode()))


def _packages(
    script: _Script, guest: GuestPlan, items: Iterable[Package], settings: Settings
) -> None:
    image, kin = guest.image, family(guest.image)
    items = list(items)
    if items and kin in {MICRO, None}:
        raise Refused(
            f"package {items[0].name} is needed, but packages cannot be installed in image "
            f"{image.name} ({image.distro}); choose an image of a Debian or RedHat family"
        )
    of_site = {DEBIAN: settings.packages_debian, REDHAT: settings.packages_redhat}.get(
        kin or "", ()
    )
    wanted = dict.fromkeys([*of_site, *(i.name for i in items if i.family == kin)])
    for name in wanted:
        if not _PACKAGE.fullmatch(name):
            raise HostFault(f"{name!r} is not a valid package name")
    if wanted:
        script.step("packages")
        script.call(f"packages_{kin}", *wanted)
    if settings.security_updates and kin in {DEBIAN, REDHAT}:
        script.step("security updates")
        script.call(f"updates_{kin}")


def _modules(script: _Script, items: Iterable[KernelModule]) -> None:
    for item in items:
        script.step(f"kernel module {item.name}")
        script.call("run modprobe", *(quote(w) for w in (item.name, *item.parameters)))


def _commands(script: _Script, items: Iterable[RootCommand]) -> None:
    for item in items:
        if not item.argv:
            raise HostFault("a RootCommand without a command")
        script.step(f"command {shlex.join(item.argv)}")
        script.call("run", *(quote(word) for word in item.argv))


def _mounts(script: _Script, guest: GuestPlan, items: Sequence[Mount]) -> None:
    for item in sorted(items, key=lambda m: len(PurePosixPath(m.target).parts)):
        script.step(f"mount {item.target}")
        if item.kind == "nfs" and boots_micro(guest.image):
            raise Refused(
                f"{item.target} is an NFS mount, and image {guest.image.name} has no NFS client; "
                "choose an image of a Debian or RedHat family"
            )
        _folder(script, guest, item.target)
        options = ["ro" if item.readonly else "rw", "nosuid", "nodev", *item.options]
        source = quote(item.source)
        if item.kind == "disk":
            script.call("find_disk", source)
            script.call("mount_disk", quote(",".join(options)), guest_path(item.target))
            continue
        words = ("-t", item.kind, "-o", quote(",".join(options)), source, guest_path(item.target))
        script.call("run mount", *words)
    home = PurePosixPath(guest.home)
    if not any(home.is_relative_to(PurePosixPath(m.target)) for m in items):
        script.step(f"home {home}")
        _folder(script, guest, str(home))
        script.call(f"chown {_owner(guest, 'job')}", guest_path(str(home)))
        script.call("chmod 0700", guest_path(str(home)))


def _links(
    script: _Script, guest: GuestPlan, links: Mapping[str, str], mounts: Sequence[Mount]
) -> None:
    """Create the symbolic links, except in shares and disks, where they would outlive the job."""
    targets = [PurePosixPath(mount.target) for mount in mounts]
    for link, leads_to in links.items():
        path = PurePosixPath(link)
        if not any(path.is_relative_to(target) for target in targets):
            script.step(f"link {link}")
            _folder(script, guest, str(path.parent))
            script.call("link", quote(leads_to), guest_path(link))


def _folder(script: _Script, guest: GuestPlan, path: str) -> None:
    if "container" in guest.image.labels:
        script.call("own_path", guest_path(path))
    script.call("folder", guest_path(path))


def _devices(script: _Script, guest: GuestPlan, items: Iterable[GuestDevice]) -> None:
    for item in items:
        script.step(f"device {item.link}")
        if ".." in PurePosixPath(item.match).parts or item.match.startswith("/"):
            raise HostFault(f"{item.match!r} must be a pattern of devices below /dev")
        owner = _owner(guest, item.owner)
        script.call("device", quote(item.match), str(int(item.nth)), guest_path(item.link), owner)


def _pci_memory(script: _Script, guest: GuestPlan, items: Iterable[PciMemory]) -> None:
    for item in items:
        script.step(f"device {item.link}")
        if not _PCI.fullmatch(item.device):
            raise HostFault(
                f"{item.device!r} is not a PCI device: write VENDOR:DEVICE, such as 1af4:1110"
            )
        vendor, _, device = item.device.partition(":")
        which = (f"0x{vendor}", f"0x{device}", str(int(item.bar)), str(int(item.nth)))
        script.call("pci_memory", *which, guest_path(item.link), _owner(guest, "job"))


def _site_scripts(
    script: _Script,
    guest: GuestPlan,
    prologue: Sequence[SiteScript],
    epilogue: Sequence[SiteScript],
) -> None:
    for name, value in (
        ("VTORQUE_JOBID", guest.job.id),
        ("VTORQUE_USER", guest.user.name),
        ("VTORQUE_RANK", str(guest.rank)),
    ):
        script.call(f"export {name}={quote(value)}")
    for number, each in enumerate(prologue):
        script.step(f"site prologue {each.name}")
        path = f"{SITE}/prologue/{number:03d}"
        script.put(path, each.content, 0o700)
        script.call("run", guest_path(path))
    if epilogue:
        script.step("site epilogue")
        for number, each in enumerate(epilogue):
            script.put(f"{SITE}/epilogue/{number:03d}", each.content, 0o700)
        script.put(EPILOGUE_CLIENT, _data("site-epilogue").encode(), 0o755)
        script.call("epilogue_waiter", str(guest.user.gid))


def cancel_commands(guest: GuestPlan, items: Sequence[ContextItem]) -> list[tuple[str, ...]]:
    """Return the commands to run when the job is canceled; empty except in the first guest."""
    return [item.argv for item in _items_of_kind(items, CancelCommand) if guest.rank == 0]


def _add_cancel_agent(script: _Script, commands: Sequence[tuple[str, ...]]) -> None:
    """Set up a second agent for :func:`cancel_commands`, because the first runs the job."""
    if commands:
        script.step("script for a canceled job")
        lines = ["#!/bin/sh", *(" ".join(quote(word) for word in argv) for argv in commands)]
        script.put(ON_CANCEL, ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"), 0o755)
        script.call("cancel_agent")
