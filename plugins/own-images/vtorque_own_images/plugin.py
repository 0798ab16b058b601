"""The plugin's declarations: settings, options, the image source and builder, and a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vtorque_core.api import (
    Command,
    ImageBuilder,
    ImageSource,
    JobRequest,
    Option,
    Refusal,
    constant_hook,
    deferred,
    hookimpl,
    setting,
)
from vtorque_core.api.values import is_personal
from vtorque_core.api.vm_options import IMG, is_own_image

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site

BASE = "own"
"""Name of the base image in the pool, which has the kernel and initrd, and of its builder."""


def root_of(value: str) -> str:
    """Parse the option ``root``. Return :data:`SCRIPT`, :data:`SUDO`, or "" for ``none``.

    Raises ValueError.
    """
    if value not in ("none", SCRIPT, SUDO):
        raise ValueError(f"is unknown: write none, {SCRIPT} or {SUDO}")
    return "" if value == "none" else value


def show_root(value: str) -> str:
    """Format the option ``root`` as the user writes it."""
    return value or "none"


SCRIPT, SUDO = "script", "true"
"""Values of the option ``root``: the script runs as root, or as the user, who may use sudo."""
ROOT = Option(
    "root",
    root_of,
    "",
    "root inside your own image: sudo works (true), or the script runs as root (script)",
    "WHO",
    show_root,
)


HOME = "home"
"""Value of the option ``work``: share the whole home."""


def work_directory(value: str) -> str:
    """Parse the option ``work``: a path, :data:`HOME` or "". Raises ValueError."""
    if value == HOME or not value:
        return value
    if not value.isprintable() or len(value.encode("utf-8", "replace")) > _MAX_PATH:
        raise ValueError(f"has a control character or more than {_MAX_PATH} bytes")
    return value


# A disk's suffix is its format, which is never probed.
_DISK = re.compile(r"(?!docker:|oci:|docker-archive:).*\.(qcow2|raw)(#[0-9:-]*)?", re.ASCII)


def is_disk(value: str) -> bool:
    """Return True if a value of ``img`` names a disk, which has its own kernel.

    The value is the user's path of the disk, or this path with the suffix that ``vsub`` appends
    (:mod:`vtorque_own_images.submitted_disk`).
    """
    return _DISK.fullmatch(value) is not None


def firmware_of(value: str) -> str:
    """Parse the option ``firmware``. Raises ValueError."""
    if value not in ("bios", "efi"):
        raise ValueError("is unknown: write bios or efi")
    return value


FIRMWARE = Option(
    "firmware", firmware_of, "bios",
    "firmware that boots your own disk: bios, or efi (UEFI without stored variables)", "KIND",
)  # fmt: skip
WORK = Option(
    "work", work_directory, "",
    "with your own image: the directory of your home that guests get (home: all of it)", "DIR",
)  # fmt: skip
_MAX_PATH = 1024
ALLOWED = frozenset({
    "arch", "checkpoint", "clean", "disk", "distro", "firmware", "fs_type", "hugepages", "img",
    "keep", "log", "numa", "ram", "resume", "root", "scam", "show_log", "vcpu_pinning", "vcpus",
    "vm_epilogue", "vm_precancel", "vm_prologue", "vms_per_node", "work",
})  # fmt: skip
"""Options that jobs with a user's own image may have. Other options, also new ones, are refused."""
DEVICES = frozenset({"pci", "unclot", "vrdma"})
"""Options that add devices; refused also if the site sets them by default."""


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.own-images]``."""

    cache: str = setting(
        "", doc="directory of the users' images, below which each user has one; empty: "
        "$XDG_CACHE_HOME/vtorque/images in the user's home"
    )  # fmt: skip
    max_size: int = setting(65536, "largest image, unpacked", "MiB")
    keep: float = setting(30 * 86400.0, "time for which an unused image stays in a cache", "s")
    cache_size: int = setting(0, "size above which unused images are removed; 0: no limit", "MiB")
    allow: bool = setting(False, "users of this site may run jobs in their own images")
    allow_root: bool = setting(
        False, doc="users of this site may be root in guests of their own images (root=script, "
        "root=true), and boot their own disks"
    )  # fmt: skip
    opt_in_unconfined_qemu: bool = setting(
        False, doc="run own images although seccomp, a uid per guest, and AppArmor or SELinux do "
        "not all confine QEMU: code that breaks out of QEMU can then attack this node"
    )  # fmt: skip


def policy_refusal(value: str, root: str, site: Site) -> Refusal | None:
    """Return the refusal of a user's own image by the site's settings, or None.

    ``root`` is the value of the option ``root``. A personal site has no such settings.
    """
    settings = site[Settings]
    fix = "write the name of an image in the pool (vmgr images list), or ask your administrator"
    if is_personal(site):
        return None
    if not settings.allow:
        why, limit = "is your own image, which this site does not accept", "allow"
        return Refusal(why, key=IMG.key, value=value, where=_WHERE + limit, fix=fix)
    if settings.allow_root and is_disk(value):
        return None if root else limits_refusal(value, site)
    if settings.allow_root or not (root or is_disk(value)):
        return None
    if root:
        fix = f"omit {ROOT.key}, or ask your administrator"
        return Refusal(
            "is not allowed on this site", key=ROOT.key, value=root, where=_WHERE + "allow_root",
            fix=fix,
        )  # fmt: skip
    return Refusal(
        "is your own disk: its programs run as root of the guest, which this site does not allow",
        key=IMG.key, value=value, where=_WHERE + "allow_root", fix=fix,
    )  # fmt: skip


_WHERE = "[plugin.own-images] "


def limits_refusal(value: str, site: Site) -> Refusal | None:
    """Return the refusal of a user's own disk if the job's limits forbid root inside, or None."""
    from vtorque_core.live import site_config  # noqa: PLC0415 - few jobs have an own disk

    of_job = cast("site_config.Site", site)
    limits = of_job.options.get(ROOT.key, site_config.Limits())
    script, sudo = (site_config.refusal(ROOT, limits, r, r, of_job.place) for r in (SCRIPT, SUDO))
    if script is None or sudo is None:
        return None
    why = "is your own disk: its programs run as root of the guest, which is not allowed to you"
    return Refusal(why, key=IMG.key, value=value, where=script.where)


@hookimpl
def vtorque_parse_args(request: JobRequest, site: Site) -> Iterator[Refusal]:
    """Refuse users' own images that the site does not allow; a personal site allows all.

    For a user's own image, also refuse options outside ``ALLOWED``, and checkpoints unless the site
    is personal. For an image of the pool, refuse the options ``root`` and ``work``. For all images
    except a user's own disk, refuse the option ``firmware``.
    """
    options: list[tuple[Option[Any], str]] = []
    if is_own_image(request[IMG]):
        if refused := policy_refusal(request[IMG], request[ROOT], site):
            yield refused
        elif request.needs and not is_personal(site):
            fix = "omit checkpoint and resume (checkpoint=never)"
            yield Refusal(
                "cannot be checkpointed on this site", key=IMG.key, value=request[IMG], fix=fix
            )
        yield from refused_options(request)
    else:
        options += [(ROOT, "image"), (WORK, "image")]
    if not is_own_image(request[IMG]) or not is_disk(request[IMG]):
        options.append((FIRMWARE, "disk (.qcow2 or .raw)"))
    for option, what in options:
        if option.key in request.given and request[option]:  # ignore defaults of the site
            value, fix = option.show(request[option]), f"name your own {what}, or omit {option.key}"
            yield Refusal(f"applies only to your own {what}", key=option.key, value=value, fix=fix)


def refused_options(request: JobRequest) -> Iterator[Refusal]:
    """Yield a refusal for each option that a job with the user's own image may not use.

    Options can add devices. A user who is root in the guest could damage a device, or use it to
    attack the host or other guests.
    """
    for key in sorted(set(request.values) - ALLOWED):
        value = request.values[key]
        # A site's default may enable it.
        if key in request.given or value is True or (value and key in DEVICES):
            why = "is not available for your own image"
            fix = f"omit {key}, or ask for an image of the pool (vmgr images list)"
            yield Refusal(why, key=key, value=str(value), fix=fix)


vtorque_settings = constant_hook(Settings)
vtorque_options = constant_hook(ROOT, WORK, FIRMWARE)
vtorque_image_sources = constant_hook(
    ImageSource(
        base=lambda value: "" if is_disk(value) else BASE,
        resolve=deferred("vtorque_own_images.pull:resolve_request"),
        image=deferred("vtorque_own_images.submitted_image:image"),
        shares=deferred("vtorque_own_images.work:request_shares"),
        mine=deferred("vtorque_own_images.cache:list_images"),
        remove=deferred("vtorque_own_images.cache:remove_image"),
    )
)
vtorque_image_builders = constant_hook(
    ImageBuilder(BASE, deferred("vtorque_own_images.builder:BaseBuilder"))
)
vtorque_commands = constant_hook(
    Command("vmgr images pull", "vtorque_own_images.command:pull"),
    Command("vmgr images save", "vtorque_own_images.command:save"),
)
