"""The boot source "warm": give a job a pre-booted guest.

A warm guest fits if its domain and that of the job's guest differ only in devices that can be
hot-plugged. Neither guest may have dedicated cores, and the job may not request features that a
warm guest lacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from vtorque_core.api import HostFault
from vtorque_core.api.boot_source import Boot, BootSource, Offer, RenderedGuest
from vtorque_core.api.guest_driver import WarmDriver
from vtorque_core.api.node_job import Site
from vtorque_core.live import spares
from vtorque_core.live.spares import SPARE_XML, WarmGuest


@dataclass(frozen=True)
class WarmSource(BootSource):
    """A warm guest, identified by the key of its journal."""

    key: str

    name = "warm"
    forbids = frozenset({"save"})
    fallback = True
    brings_disk = True

    @property
    def warm_key(self) -> str:
        """The key of the warm guest."""
        return self.key

    def start(self, boot: Boot) -> None:
        """Move the guest's files to the job's paths, and plug in the job's devices.

        The job's console log is a hard link to the warm guest's log, to which the guest's console
        recorder still writes.
        """
        guest, paths = boot.guest, boot.paths
        run, state = paths.job_run(self.key) / "g0", paths.job_state(self.key) / "g0"
        try:
            for channel in boot.channels:
                (run / channel.relative_to(guest.run_dir)).rename(channel)
            os.link(state / "console.log", guest.state_dir / "console.log")
        except OSError as error:
            raise HostFault(f"warm guest {self.key}: {error}") from None
        boot.adopt_guest()


def offer_guests(guests: Sequence[RenderedGuest], site: Site) -> Iterator[Offer]:
    """Yield, for each guest of the job, the warm guests that fit."""
    waiting = [each for each in spares.warm_guests(site.paths) if each.waits and not each.job]
    waiting.sort(key=lambda each: each.since)
    for guest in guests if waiting else ():
        if not isinstance(guest.driver, WarmDriver) or guest.plan.placement.own:
            continue
        wanted = guest.bare_xml()
        for each in waiting:
            if _bare_xml(each) == wanted:
                yield Offer(guest.plan.index, WarmSource(each.key))


def _bare_xml(spare: WarmGuest) -> str:
    with suppress(OSError):
        return (spare.directory / SPARE_XML).read_text(encoding="utf-8")
    return ""
