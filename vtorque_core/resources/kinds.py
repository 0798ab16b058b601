"""All resource kinds of the core, which the teardown can release without any plugin."""

from __future__ import annotations

from vtorque_core.api.acquired import CoreResource
from vtorque_core.api.daemon_process import DaemonProcess
from vtorque_core.api.disk_file import DiskFile
from vtorque_core.api.job_files import File, Tree
from vtorque_core.resources.disk import DiskCopy, MountResource, Overlay
from vtorque_core.resources.domain import Domain
from vtorque_core.resources.lease import ImageUse, Lease, SpareUse
from vtorque_core.resources.netfilter import Netfilter
from vtorque_core.resources.starter import BootStarter
from vtorque_core.resources.user_disk import UserDisk
from vtorque_core.resources.virtiofs_daemon import Virtiofsd

CORE_KINDS: dict[str, type[CoreResource]] = {
    kind.kind: kind
    for kind in (
        File, Tree, Overlay, DiskCopy, DiskFile, ImageUse, Domain, DaemonProcess, BootStarter,
        Virtiofsd, UserDisk, MountResource, Netfilter, Lease, SpareUse,
    )
}  # fmt: skip
HELPERS = frozenset({DaemonProcess.kind, Netfilter.kind, UserDisk.kind, Virtiofsd.kind})
"""Kinds of a guest's processes and packet filters. They do not need each other."""
