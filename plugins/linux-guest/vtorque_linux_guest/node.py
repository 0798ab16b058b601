"""The Linux guest plugin on the node: settings, resources and health checks."""

from __future__ import annotations

import logging
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import HostFault, Refused, constant_hook, deferred, hookimpl
from vtorque_core.api.guest_context import CancelCommand, ContextItem, GuestFile, RootCommand
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_core.api.values import is_personal
from vtorque_core.api.vm_options import DISK
from vtorque_linux_guest.guest.contract import EPILOGUE_MARKER, SITE
from vtorque_linux_guest.guest.linux_family import family
from vtorque_linux_guest.plugin import CLEAN, CLOUD_CONFIG, VM_PRECANCEL
from vtorque_linux_guest.settings import Settings, agent_path, site_scripts

if TYPE_CHECKING:  # a job's end waits for the imports of this module
    from vtorque_core.api.guest_plan import GuestPlan

VIRTLOGD = Path("/run/libvirt/virtlogd-sock")
_VIRTLOGD_TIMEOUT = 5.0  # seconds
QEMU_CONF = Path("/etc/libvirt/qemu.conf")
_NO_VIRTLOGD = re.compile(r'^\s*stdio_handler\s*=\s*"file"', re.MULTILINE)
_site_epilogue = deferred("vtorque_linux_guest.job.site_epilogue:SiteEpilogue")
_log = logging.getLogger(__name__)
_NO_ACLS = "%s: user.* attributes work as on the host; ACLs are not evaluated in the guest"

FILE_MAX, STATUS = Path("/proc/sys/fs/file-max"), Path("/proc/self/status")
_LEAST_FILES = 100_000  # that a share's daemon wants
_CAP_SYS_RESOURCE = 1 << 24  # linux/capability.h
vtorque_settings = constant_hook(Settings)

# Delete files of guest root, and give the user its directories that contain the user's files. Each
# find gets 20 s, because the start waits for it. The job of vmgr clean reports what remains. No
# -xdev, because file systems below the share are mounts in the guest, too.
_CLEAN = """t="timeout 20 find"
$t "$1" -depth -user 0 ! -type d -exec rm -f {} +
$t "$1" -depth -user 0 -type d -exec rmdir {} + 2>/dev/null
$t "$1" -depth -user 0 -type d -exec chown -h "$2" {} +
exit 0"""


@hookimpl
def vtorque_guest_context(guest: GuestPlan, site: Site) -> Iterator[ContextItem]:
    """Yield the user's cloud-config, the command of ``clean=DIR``, and scripts for cancellation.

    All guests get the cloud-config. Only the first guest gets the rest. ``vmgr clean`` removes
    files below DIR that belong to root of a guest. The scripts run if the job is canceled.
    Raises Refused for an invalid cloud-config, or if DIR is not in a writable share.
    """
    if guest.request[CLEAN] and not guest.rank:  # before any program of the user runs there
        yield _clean_command(guest, guest.request[CLEAN])
    if (own := guest.request[CLOUD_CONFIG]) is not None:
        from vtorque_linux_guest.boot import user_cloud_config  # noqa: PLC0415 - few jobs need it

        kin = family(guest.image) if guest.image.guest_type == "linux" else None
        wanted, allowed = user_cloud_config.read(own), site[Settings].user_modules
        home = guest.home
        yield from user_cloud_config.items(wanted, allowed, kin, guest.user, home)
    if guest.rank:
        return
    if (own := guest.request[VM_PRECANCEL]) is not None:
        yield GuestFile(f"{SITE}/precancel", own.content, 0o500, "job")
        yield CancelCommand((f"{SITE}/precancel",))
    if guest.image.guest_type == "linux":
        settings = site[Settings].for_image(guest.image)
        for number, script in enumerate(site_scripts(settings.precancel)):
            path = f"{SITE}/precancel.d/{number:03d}"
            yield GuestFile(path, script.content, 0o555)
            yield CancelCommand((path,))


vtorque_resources = hookimpl(deferred("vtorque_linux_guest.resources:resources"))


def _clean_command(guest: GuestPlan, place: str) -> RootCommand:
    """Return the command for ``vmgr clean``: it removes guest root's files below ``place``.

    The command runs in the guest, as root. On the host, guest root has a subordinate id (subuid(5))
    of the user, so the command cannot change other users' files.
    """
    shares = [s.target for s in guest.shares if s.kind == "virtiofs" and not s.readonly]
    if not any(Path(place).is_relative_to(target) for target in shares):
        where = ", ".join(shares) or "this node has no writable shares"
        fix = f"name a directory in a writable share: {where}"
        raise Refused("is not in a writable share", key=CLEAN.key, value=place, fix=fix)
    owner = f"{guest.user.uid}:{guest.user.gid}"
    return RootCommand(("/bin/sh", "-c", _CLEAN, "sh", place, owner))


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Refuse a user's qcow2 file (``disk=``) if qemu-storage-daemon has also opened another file.

    The daemon serves the user's file to QEMU. The header of a changed file can name another file.
    """
    for guest in job.guests:
        if guest[DISK].endswith(".qcow2"):
            from vtorque_linux_guest.boot import served_disk  # noqa: PLC0415 - few jobs need it

            served_disk.require_one_file(guest)


@hookimpl
def vtorque_post_boot(job: NodeJob) -> None:
    """Acquire a :class:`SiteEpilogue` for each guest that has a site epilogue."""
    seconds = job.site[Settings].epilogue_timeout
    for guest in job.guests:
        if shared := [share.target for share in guest.shares if share.kind == "virtiofs"]:
            _log.info(_NO_ACLS, ", ".join(shared), extra={"guest": guest.index})
        if (guest.run_dir / EPILOGUE_MARKER).exists():
            run_dir = str(guest.run_dir)
            job.acquire(_site_epilogue(run_dir, guest.hostname, guest.rank, seconds), guest=guest)


def agent_check(site: Site) -> Iterator[HealthResult]:
    """Check whether images without a built-in agent can be used on this node."""
    path = agent_path(site[Settings], os.uname().machine)
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        yield HealthResult(
            "warning",
            f"{path}: {error.strerror}: only images with a built-in agent can be used",
            fix="build it: python3 -m vtorque_linux_guest.agent.build PATH; or set agent in "
            "[plugin.linux-guest]",
        )
        return
    if start != b"\x7fELF":
        yield HealthResult(
            "failed", f"{path} is not an executable file", fix="set agent in [plugin.linux-guest]"
        )
        return
    yield HealthResult("ok", f"images without an agent get {path}")


def acl_check(_: Site) -> Iterator[HealthResult]:
    """Report whether extended attributes and access control lists work in shares."""
    yield HealthResult(
        "ok",
        "user.* attributes work in shares; access control lists are not evaluated in guests, "
        "where the umask limits the mask of a default ACL",
    )


def descriptors_check(_: Site) -> Iterator[HealthResult]:
    """Check that virtiofs daemons can open enough files without exhausting the node's limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < _LEAST_FILES and not _may_raise_limits():
        yield HealthResult(
            "warning",
            f"the hard limit of open files (RLIMIT_NOFILE) is {hard}: in a guest whose memory can "
            "cache more, walking a larger shared tree ends in 'Too many open files'",
            fix=f"set LimitNOFILE={_LEAST_FILES} or more for the service that starts jobs "
            "(systemd.exec(5)), or nofile in limits.conf(5), then restart it",
        )
    most = int(FILE_MAX.read_text(encoding="ascii"))
    kib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 10
    if most >= kib:
        yield HealthResult(
            "ok",
            f"fs.file-max is {most}: enough, because each guest caches at most one file per "
            "KiB of its memory",
        )
        return
    yield HealthResult(
        "warning",
        f"fs.file-max is {most}: the daemon of a share may open an eighth of it, or 100,000 "
        "files. If enough guests do so, no process of a user can open a file",
        fix=f"write fs.file-max={kib} to a file in /etc/sysctl.d, then run sysctl --system",
    )


def _may_raise_limits() -> bool:
    found = re.search(r"^CapEff:\t(\w+)$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) & _CAP_SYS_RESOURCE)


def scripts_check(site: Site) -> Iterator[HealthResult]:
    """Report which site scripts run in guests, and check their permissions."""
    settings = site[Settings]
    for what in ("prologue", "epilogue", "precancel"):
        directory = getattr(settings, what)
        try:
            found = site_scripts(directory)
        except HostFault as error:
            yield HealthResult("failed", str(error), fix=f"chown root: and chmod go-w {directory}")
            continue
        names = ", ".join(script.name for script in found) or "none"
        yield HealthResult("ok", f"guest {what} scripts: {names}")


def virtlogd_check(site: Site) -> Iterator[HealthResult]:
    """Check that virtlogd, which writes the messages of QEMU, answers."""
    conf = QEMU_CONF.read_text("utf-8", "replace") if QEMU_CONF.exists() else ""
    if is_personal(site) or _NO_VIRTLOGD.search(conf):
        return  # libvirtd of a user's session starts its own virtlogd
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_VIRTLOGD_TIMEOUT)
        try:
            connection.connect(str(VIRTLOGD))
        except OSError as error:
            yield HealthResult(
                "failed",
                f"virtlogd does not answer at {VIRTLOGD} ({error}): no guest can start",
                fix="start virtlogd as root (systemctl start virtlogd.socket)",
            )
        else:
            yield HealthResult("ok", f"virtlogd answers at {VIRTLOGD}")


vtorque_health_checks = constant_hook(
    HealthCheck("virtlogd", virtlogd_check),
    HealthCheck(
        "linux guest cloud-config", deferred("vtorque_linux_guest.boot.cloud_config_check:check")
    ),
    HealthCheck("linux guest agent", agent_check),
    HealthCheck("linux guest shares", acl_check),
    HealthCheck("linux guest descriptors", descriptors_check),
    HealthCheck("linux guest scripts", scripts_check),
)
