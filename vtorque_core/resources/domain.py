"""Resource: a libvirt domain."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api.acquired import RELEASE_TIME, CoreResource, unjournalled
from vtorque_core.base import hypervisor


@dataclass(frozen=True)
class Domain(CoreResource):
    """A transient libvirt domain. ``start`` boots it, restores it, or claims a warm guest."""

    kind = "domain"
    blocking = True
    retry_seconds = 5.0
    name: str
    uuid: str
    uri: str
    start: Callable[[], None] = unjournalled()

    def create(self) -> None:
        self.start()

    def release(self) -> None:
        from vtorque_core.resources import qemu_exit  # noqa: PLC0415 - not at a start

        qemu_exit.end(self.name, self.uuid)
        hypervisor.destroy_domain(self.uri, self.uuid, RELEASE_TIME)
        if self.uri == "qemu:///session":  # logrotate(8) removes the logs of root's libvirtd
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            Path(cache, "libvirt/qemu/log", f"{self.name}.log").unlink(missing_ok=True)
