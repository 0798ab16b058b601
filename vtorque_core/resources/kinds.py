"""All resource kinds of the core, which the teardown can release without any plugin."""

from __future__ import annotations

from importlib import import_module

from vtorque_core.api.acquired import CoreResource

HELPERS = frozenset({"process", "netfilter", "userdisk", "virtiofsd"})
"""Kinds of a guest's processes and packet filters. They do not need each other."""
CORE_KINDS = {
    "file": "api.job_files:File", "tree": "api.job_files:Tree",
    "disk-file": "api.disk_file:DiskFile", "overlay": "resources.disk:Overlay",
    "disk-copy": "resources.disk:DiskCopy", "mount": "resources.disk:MountResource",
    "domain": "resources.domain:Domain", "starter": "resources.starter:BootStarter",
    "process": "api.daemon_process:DaemonProcess", "userdisk": "resources.user_disk:UserDisk",
    "netfilter": "resources.netfilter:Netfilter", "lease": "resources.lease:Lease",
    "image": "resources.lease:ImageUse", "spare": "resources.lease:SpareUse",
    "virtiofsd": "resources.virtiofs_daemon:Virtiofsd",
}  # fmt: skip
"""The class of each kind. It is imported when a record is released."""


def core_kind(kind: str) -> type[CoreResource] | None:
    """Import and return the class of a kind of the core; None for other kinds."""
    module, _, name = CORE_KINDS.get(kind, "").partition(":")
    return getattr(import_module(f"vtorque_core.{module}"), name) if name else None
