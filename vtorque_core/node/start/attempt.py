"""State of one start of a job on this node."""

from __future__ import annotations

import logging
import sys
import syslog
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.base.errors import HostFault, Refused, printable
from vtorque_core.base.names import JobAttempt
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import WITHOUT_ROOT
from vtorque_core.config.site_config import Site
from vtorque_core.records import log
from vtorque_core.records.journal import Journal

_log = logging.getLogger(__name__)


@dataclass
class StartAttempt:
    """One start of a job on this node.

    Hooks receive it as :class:`vtorque_core.api.node_job.NodeJob`.
    """

    job: JobAttempt
    user: JobUser
    site: Site
    deadline: float
    journal: Journal
    plugins: Plugins
    guests: Sequence[GuestPlan] = ()
    acting: str = "core"
    phase: str = "plan"
    warnings: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.job.id

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            _log.warning("%s", text)
            sys.stderr.write(f"vtorque: warning: {printable(text, 2000)}\n")
            syslog.syslog(syslog.LOG_WARNING, f"vtorque {self.id}: {printable(text, 2000)}")

    def acquire(
        self, resource: Resource, guest: GuestPlan | None = None, needs: Iterable[int] = ()
    ) -> int:
        if time.monotonic() > self.deadline:
            raise HostFault(
                f"[node] start_timeout passed before {resource.kind} was acquired", stage=self.phase
            )
        if resource.needs_root and self.site.owner:
            resource_name = f"{resource.kind} ({self.acting})"
            raise Refused(f"{resource_name} needs root{WITHOUT_ROOT}")
        index = guest.index if guest is not None else None
        begun = time.monotonic()
        seq = self.journal.acquire(
            resource, plugin=self.acting, guest=index, needs=tuple(needs), phase=self.phase
        )
        millis = (time.monotonic() - begun) * 1000
        _log.debug("%s (%d): %.1f ms", resource.kind, seq, millis, extra={"guest": index})
        return seq

    def acquire_all(
        self, resources: Iterable[Resource], guest: GuestPlan, acting: str = "core"
    ) -> None:
        self.acting = acting
        for resource in resources:
            self.acquire(resource, guest)
        self.acting = "core"

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.journal.phase(phase)
        log.enter(phase)
        _log.debug("begins")

    def call_hook(self, hook: Callable[..., None]) -> None:
        """Call a hook of each plugin, and journal the hook's resources under the plugin's name."""
        for name in self.plugins.names:
            self.acting = name
            begun = time.monotonic()
            with log.log_context(plugin=name):
                self.plugins.only_plugin(name).collect(hook, job=self)
                if hook.__name__ in self.plugins.hooks_of(name):
                    _log.debug("%s: %.1f ms", hook.__name__, (time.monotonic() - begun) * 1000)
        self.acting = "core"
