"""The driver of OSv guests: their devices and their command line.

Privileges: root on the node, except for :meth:`OsvDriver.run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import PurePosixPath

from vtorque_core.api import Refused
from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_context import ContextItem, EnvVar, GuestFile
from vtorque_core.api.guest_driver import LateDriver, ReadyGuest, Script, Streams
from vtorque_core.api.guest_plan import GuestPlan, Share
from vtorque_core.api.job_files import File
from vtorque_core.api.libvirt_domain import (
    Clock,
    Console,
    Disk,
    Element,
    Filesystem,
    KernelBoot,
    Single,
)
from vtorque_core.api.node_job import Site
from vtorque_osv import check, cmdline, script
from vtorque_osv.bootline import BootLine
from vtorque_osv.console import BEGIN, BEGIN_REST, BEGIN_SEED
from vtorque_osv.disk import MAX_BOOT_LINE
from vtorque_osv.order import PROPERTIES, BootOrder, GuestProperties
from vtorque_osv.settings import OSV_MODE, Settings

CONSOLE_SOCKET = "console.sock"
SEED = "seed.iso"
SCRIPT = "script"
_READ_AHEAD = 320 << 10  # bytes; 300 KiB were enough for libcdio 2.1
_TMP = "/tmp"  # noqa: S108 - OSv's own, in the memory of one job's guest


class OsvDriver(LateDriver):
    """The driver of OSv guests; see :class:`vtorque_core.api.guest_driver.LateDriver`."""

    def elements(self, guest: GuestPlan, site: Site) -> Iterator[Element]:
        """Yield the domain's HPET, console, kernel boot, seed, script disk and shares."""
        yield Clock(hpet=True)  # without an HPET, OSv halts under emulation
        yield Console(str(guest.run_dir / CONSOLE_SOCKET))
        if guest.image.kernel is not None:
            yield KernelBoot(kernel=str(guest.image.kernel))
        if _has_cloud_init(guest):  # OSv's cloud-init searches the second and later disks
            yield Disk("seed", path=str(guest.state_dir / SEED), format="raw", readonly=True)
        if guest[OSV_MODE] != "rest":
            yield Disk("script", path=str(guest.state_dir / SCRIPT), format="raw", readonly=True)
        for share in (*root_share(guest), *mounted_shares(guest, "virtiofs")):  # in this order
            yield Filesystem(
                share.name,
                source=share.source,
                tag=share.name,
                readonly=True,
                user_owned=share.user_owned,
            )

    def context(self, guest: GuestPlan, site: Site) -> Iterator[ContextItem]:
        """Yield the variable ``DISTRO``. Raises Refused for a job on several nodes."""
        if len(guest.peers) > guest.guests_per_node:
            raise Refused(
                f"image {guest.image.name}: an OSv job can have only one node, not "
                f"{len(guest.peers) // guest.guests_per_node}",
                fix="request one node; -vm vms_per_node=N starts N guests on it",
            )
        cmdline.network_options(guest.addresses)
        yield EnvVar("DISTRO", "OSV")

    def resources(
        self, guest: GuestPlan, items: Sequence[ContextItem], site: Site
    ) -> Iterator[Resource]:
        """Yield the file with :class:`GuestProperties` for the job shell, and cloud-init's seed.

        A guest without cloud-init has no seed.
        """
        rest = guest[OSV_MODE] == "rest"
        files = referenced_files(guest, items)
        properties = GuestProperties(
            mode=guest[OSV_MODE],
            address=next((a.ip for a in guest.addresses if a.ip), ""),
            begin=BEGIN_REST if rest else BEGIN_SEED if _has_cloud_init(guest) else BEGIN,
            named=check.named_commands(guest.image),
            files=files if rest else {},
            environ=variables(guest, items),
            seconds=site[Settings].rest_timeout,
        )
        path = str(guest.run_dir / PROPERTIES)
        yield File(path, mode=0o440, gid=guest.user.gid, content=properties.encode())
        if _has_cloud_init(guest):
            content = seed(files)
            yield File(str(guest.state_dir / SEED), mode=0o400, uid=guest.qemu_uid, content=content)

    def late_items(
        self, guest: GuestPlan, items: Sequence[ContextItem], order: bytes, site: Site
    ) -> Iterator[Single | Resource]:
        """Yield OSv's command line and, unless ``-vm osv_mode`` is ``rest``, the script disk."""
        asked = BootOrder.decode(order)
        commands = script.parse(asked.script, check.named_commands(guest.image))
        environ = environment(guest, items, asked)
        if guest[OSV_MODE] != "rest":
            content = cmdline.script_disk(environ, (*_commands_before(guest), *commands))
            path = str(guest.state_dir / SCRIPT)
            yield File(path, mode=0o400, uid=guest.qemu_uid, content=content)
        line = command_line(guest, environ, asked.cwd)
        if guest.image.kernel is not None:
            yield KernelBoot(cmdline=line)
        elif len(line) > MAX_BOOT_LINE:
            raise Refused(
                f"OSv's command line would have {len(line)} bytes",
                limit=f"{MAX_BOOT_LINE} bytes",
                where=f"image {guest.image.name}, which has no separate kernel file",
                fix="ask an admin for an image with a kernel",
            )
        else:
            yield BootLine(str(guest.root_disk), line)

    def await_ready(self, guest: GuestPlan, deadline: float, step: Callable[[str], None]) -> None:
        """Do nothing: an OSv guest runs the job as soon as it has booted."""

    def run(self, guest: ReadyGuest, script: Script, streams: Streams) -> int:
        """Run the job in all guests of this node; see :func:`vtorque_osv.jobs.run`."""
        from vtorque_osv import jobs  # noqa: PLC0415 - root does not need it

        return jobs.run(guest, script, streams)


def environment(
    guest: GuestPlan, items: Sequence[ContextItem], order: BootOrder
) -> Mapping[str, str]:
    """Return the job's variables from ``order``, overridden by the variables of this guest."""
    told = {item.name for item in items if isinstance(item, EnvVar)}
    of_user = {name: value for name, value in order.environ.items() if name not in told}
    return cmdline.guest_variables({**of_user, **variables(guest, items)})


def command_line(guest: GuestPlan, environ: Mapping[str, str], cwd: str) -> str:
    """Return a guest's OSv command line: it runs the script disk's commands, or the REST server."""
    rest = guest[OSV_MODE] == "rest"
    options = [
        *cmdline.base_options(),
        *cmdline.network_options(guest.addresses),
        *cmdline.mount_options(
            (share.target for share in mounted_shares(guest, "virtiofs")),
            first=len(root_share(guest)),
        ),
    ]
    within = guest_directory(guest, cwd)
    options += [f"--cwd={within}"] if within and not rest else []
    number = (guest.image.disk is not None) + _has_cloud_init(guest)
    command = cmdline.REST_SERVER if rest else f"runscript /dev/vblk{number}"
    line = cmdline.boot_line(options, {} if rest else environ, command)
    return f"{guest.image.cmdline} {line}".lstrip()


def _commands_before(guest: GuestPlan) -> Iterator[script.ProgramCall]:
    """Yield the commands to run before the job: cloud-init (with the seed) and NFS mounts."""
    if _has_cloud_init(guest):
        yield script.ProgramCall(0, (cmdline.CLOUD_INIT,))
    for share in mounted_shares(guest, "nfs"):
        host, _, export = share.source.partition(":")
        url = f"nfs://{host}{export}?version=4"
        yield script.ProgramCall(0, ("/tools/mount-fs.so", "nfs", url, share.target))


def mounted_shares(guest: GuestPlan, kind: str) -> list[Share]:
    """Return the shares of this kind that have a mount point in the image."""
    points = check.mount_points(guest.image)
    able = kind != "nfs" or check.has(guest.image, check.NFS)
    root = guest.image.labels.get(check.ROOT)
    fit = [s for s in guest.shares if s.kind == kind and s.target in points and s.name != root]
    return fit if able else []


def root_share(guest: GuestPlan) -> list[Share]:
    """Return the share with the guest's root file system; [] for a root file system on a disk."""
    name = guest.image.labels.get(check.ROOT)
    return [s for s in guest.shares if s.name == name and s.kind == "virtiofs"]


def guest_directory(guest: GuestPlan, cwd: str) -> str:
    """Return the working directory if it is in a mounted share, otherwise an empty string."""
    targets = [
        share.target for kind in ("virtiofs", "nfs") for share in mounted_shares(guest, kind)
    ]
    path = PurePosixPath(cwd)
    safe = cwd.isprintable() and "\\" not in cwd and cwd.isascii()
    return cwd if safe and any(path.is_relative_to(target) for target in targets) else ""


def referenced_files(guest: GuestPlan, items: Sequence[ContextItem]) -> dict[str, str]:
    """Return path and text of each file that a variable of the guest names, such as the node file.

    All paths are in /tmp, the only writable directory of OSv. Raises Refused for binary files.
    """
    if guest[OSV_MODE] != "rest" and not check.has(guest.image, check.CLOUD_INIT):
        return {}
    told = {item.value for item in items if isinstance(item, EnvVar)}
    files = (item for item in items if isinstance(item, GuestFile) and item.path in told)
    return {_file_target(file): _text(file) for file in files}


def _text(file: GuestFile) -> str:
    try:
        return file.content.decode()
    except UnicodeDecodeError:
        raise Refused(
            f"{file.path}: is not UTF-8, but OSv guests support only text files"
        ) from None


def _file_target(file: GuestFile) -> str:
    return f"{_TMP}/{PurePosixPath(file.path).name}"


def _has_cloud_init(guest: GuestPlan) -> bool:
    return guest[OSV_MODE] != "rest" and check.has(guest.image, check.CLOUD_INIT)


def variables(guest: GuestPlan, items: Sequence[ContextItem]) -> Mapping[str, str]:
    """Return the guest's own variables, with paths inside the guest.

    A variable that names a file is omitted if the guest does not get the file.
    """
    own = referenced_files(guest, items)
    moved = {item.path: _file_target(item) for item in items if isinstance(item, GuestFile)}
    found = {item.name: item.value for item in items if isinstance(item, EnvVar)}
    return {
        name: moved.get(value, value)
        for name, value in found.items()
        if value not in moved or moved[value] in own
    }


def seed(files: Mapping[str, str]) -> bytes:
    """Return an ISO image with ``/user-data`` for OSv's cloud-init (as JSON, which is also YAML).

    It contains no host name, because a host name makes OSv wait for DHCP. It ends with zeros,
    because OSv's iso-read reads beyond the end of the data.
    """
    content = json.dumps({"files": dict(files)}).encode() + b"\n"
    import pycdlib  # noqa: PLC0415 - takes 25 ms, and no job shell needs it

    image = pycdlib.PyCdlib()
    image.new(interchange_level=3, rock_ridge="1.09", vol_ident="cidata")
    image.add_fp(BytesIO(content), len(content), "/USERDATA.;1", rr_name="user-data")
    out = BytesIO()
    image.write_fp(out)
    image.close()
    return out.getvalue() + bytes(_READ_AHEAD)
