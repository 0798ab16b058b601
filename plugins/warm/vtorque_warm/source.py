"""The boot source "warm": a guest that was booted before its job becomes the job's.

It fits if its domain and the job's differ only in what can be plugged in. Neither has cores of its
own, and the job asks for nothing that cannot be done to such a guest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from vtorque_core.api import HostFault, hookimpl
from vtorque_core.api.boot_source import Boot, BootSource, Offer, RenderedGuest
from vtorque_core.api.guest_driver import SpareDriver
from vtorque_core.api.node_job import Site
from vtorque_core.live import spares
from vtorque_core.live.spares import SPARE_XML, Spare


@dataclass(frozen=True)
class WarmGuest(BootSource):
    """A warm guest, by the key of its journal."""

    key: str

    name = "warm"
    forbids = frozenset({"save"})
    fallback = True
    brings_disk = True

    @property
    def adopts(self) -> str:
        """The warm guest."""
        return self.key

    def start(self, boot: Boot) -> None:
        """Bring its files to where the job's are looked for, and plug in the job's devices.

        QEMU does not notice that the sockets it listens on are renamed. The log of its console gets
        a second name; the file that virtlogd begins after 2 MiB has only the warm guest's.
        """
        guest, paths = boot.guest, boot.paths
        run, state = paths.job_run(self.key) / "g0", paths.job_state(self.key) / "g0"
        try:
            for channel in boot.channels:
                (run / channel.relative_to(guest.run_dir)).rename(channel)
            os.link(state / "console.log", guest.state_dir / "console.log")
        except OSError as error:
            raise HostFault(f"warm guest {self.key}: {error}") from None
        boot.take_over()


@hookimpl
def vtorque_rendered_sources(guests: Sequence[RenderedGuest], site: Site) -> Iterator[Offer]:
    """Offer each guest of the job the warm guests that can become it."""
    if not any(site.paths.journal.glob("spare-*")):  # spares() reads the journals of all jobs
        return
    waiting = [each for each in spares.spares(site.paths) if each.waits and not each.job]
    waiting.sort(key=lambda each: each.since)
    for guest in guests if waiting else ():
        if not isinstance(guest.driver, SpareDriver) or guest.plan.placement.own:
            continue
        wanted = guest.bare_xml()
        for each in waiting:
            if _bare_xml(each) == wanted:
                yield Offer(guest.plan.index, WarmGuest(each.key))


def _bare_xml(spare: Spare) -> str:
    with suppress(OSError):
        return (spare.directory / SPARE_XML).read_text(encoding="utf-8")
    return ""
