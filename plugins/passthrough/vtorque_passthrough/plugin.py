"""``-vm pci=gpu:1+fpga:2``: PCI cards of the site's classes for each guest.

``vsub`` imports this module to request the cards from the batch system.
``[options.pci]`` limits what users may request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtorque_core.api import Extra, JobRequest, Option, Refusal, constant_hook, hookimpl, setting
from vtorque_core.api.vm_options import VMS_PER_NODE

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site

CLASS = r"[a-z][a-z0-9_-]{0,31}"
CLASSES = "[plugin.passthrough] classes"
_CARD = re.compile(rf"({CLASS})(?::([1-9][0-9]?))?", re.ASCII)
_RAW = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2,4}:[0-9a-f]{2,4}(?:\.[0-7])?", re.ASCII)
_WORD = "[A-Za-z0-9_.-]+"
_RESOURCE = re.compile(rf"[A-Za-z]{_WORD}(?:/{_WORD}(?::{_WORD})?)?", re.ASCII)


@dataclass(frozen=True)
class CardClass:
    """A class of cards: one table of ``[[plugin.passthrough.classes]]``.

    Args:
        name: the name in requests.
        ids: ``vendor:device`` of its functions, as ``lspci -nn`` shows them.
        addresses: globs of the PCI addresses that guests may have.
        max_per_guest: maximum number of cards per guest; 0: no limit.
        allow_no_reset: also allow cards that the kernel cannot reset between two jobs.
        device: glob of the device nodes below /dev that the guest's driver creates. The job's user
            owns them, and the n-th is also /dev/vtorque/<name><n>.
        resource: the batch system's name of these cards: Slurm ``gres/gpu`` or ``gres/gpu:a100``,
            OpenPBS ``ngpus``, Torque ``gpus``; empty if the batch system does not count the cards.
        files: with ``resource``: the host's device file of each card, in the order of the batch
            system's numbers. Without ``files``, guests get only cards that no host driver uses.
    """

    name: str
    ids: tuple[str, ...]
    addresses: tuple[str, ...] = ("*",)
    max_per_guest: int = 0
    allow_no_reset: bool = False
    device: str = ""
    resource: str = ""
    files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(CLASS, self.name, re.ASCII):
            raise ValueError(f"name={self.name!r}: write a lowercase letter, then a-z 0-9 _ -")
        for ident in self.ids:
            if not re.fullmatch("[0-9a-f]{4}:[0-9a-f]{4}", ident, re.ASCII):
                raise ValueError(f"{self.name}: {ident!r} must be vendor:device, like 10de:20b0")
        if self.resource and not _RESOURCE.fullmatch(self.resource):
            raise ValueError(f"{self.name}: {self.resource!r} is not in the form gres/gpu or ngpus")
        if self.files and not self.resource:
            raise ValueError(f"{self.name}: the key 'files' requires the key 'resource'")


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.passthrough]``."""

    classes: tuple[CardClass, ...] = setting(
        (),
        doc="card classes that jobs can request: [[plugin.passthrough.classes]] name = "
        '"gpu", ids = ["10de:20b0"]',
    )
    required: bool = setting(
        True, doc="refuse a job on a node without the requested cards; false: run it without"
    )
    sysfs: str = setting("/sys", doc="path of sysfs (for tests)")


def cards(text: str) -> dict[str, int]:
    """Parse ``CLASS:NUMBER+...`` and return the number of cards by class.

    Raises ValueError if the text is invalid. PCI addresses are invalid, too, because users cannot
    choose a particular card.
    """
    wanted: dict[str, int] = {}
    for word in (w.strip() for w in text.split("+")) if text else ():
        if _RAW.fullmatch(word.lower()):
            raise ValueError(
                f"contains {word}, a PCI address or device number, which users cannot request: "
                "use a class of cards that the site has defined, like gpu:1"
            )
        match = _CARD.fullmatch(word)
        if match is None or match[1] in wanted:
            raise ValueError(
                "is not a list of cards: write CLASS:NUMBER with a number from 1 to 99; to request "
                "several classes, write each class once and join them with +, like gpu:1+fpga:2"
            )
        wanted[match[1]] = int(match[2] or 1)
    return wanted


def card_list(text: str) -> str:
    """Return the list of cards in canonical form, ``CLASS:NUMBER+...``, sorted by class."""
    return "+".join(f"{name}:{number}" for name, number in sorted(cards(text).items()))


PCI = Option("pci", card_list, "", "PCI cards of each guest, by class", "CLASS:N[+CLASS:N]",
             separator="+", forbids=frozenset({"save", "migrate"}), needs_root=bool)  # fmt: skip
vtorque_options = constant_hook(PCI)
vtorque_settings = constant_hook(Settings)


@hookimpl
def vtorque_parse_args(request: JobRequest, site: Site) -> Iterator[Refusal]:
    """Refuse unknown classes, and more cards of a class than a guest may have."""
    known = {c.name: c for c in site[Settings].classes}
    for name, number in cards(request[PCI]).items():
        if name not in known:
            names = ", ".join(known) or "none"
            yield Refusal(f"unknown class {name}", PCI.key, request[PCI], names, CLASSES)
        elif known[name].max_per_guest and number > known[name].max_per_guest:
            most = f"{known[name].max_per_guest} for each guest"
            yield Refusal(
                f"too many of {name}", PCI.key, request[PCI], most, f"{CLASSES}, max_per_guest"
            )


@hookimpl
def vtorque_needs(request: JobRequest, site: Site) -> Iterator[Extra]:
    """Request the cards from the batch system, if it counts them as a resource."""
    wanted = cards(request[PCI])
    for of in site[Settings].classes if wanted else ():
        if of.resource and of.name in wanted:
            yield Extra(resources={of.resource: request[VMS_PER_NODE] * wanted[of.name]})
