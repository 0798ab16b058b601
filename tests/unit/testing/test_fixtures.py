"""The fixtures like a plugin's author uses them, with a plugin as source text. No root."""

import stat

import pytest

from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.libvirt_domain import MemoryBacking
from vtorque_core.base.errors import Refused
from vtorque_testing.planned import MACHINES, NoFit, check_schema

ACME = """
    import os
    from dataclasses import dataclass
    from pathlib import Path
    from typing import ClassVar

    from vtorque_core.api import Option, constant_hook, count, hookimpl, require_root_owned, setting
    from vtorque_core.api.acquired import Resource
    from vtorque_core.api.claims import PoolClaim
    from vtorque_core.api.libvirt_domain import MemoryBacking

    CARDS = Option("cards", parse=count, default=0, help="cards per guest", metavar="N")

    @dataclass(frozen=True)
    class Settings:
        cards: tuple[str, ...] = setting((), doc="cards of this node")
        place: str = setting("/nowhere", doc="where a card is switched on")

    @dataclass(frozen=True)
    class Card(Resource):
        kind: ClassVar[str] = "acme-card"
        path: str

        def create(self):
            require_root_owned(Path(self.path).parent)
            with open(self.path, "x") as file:
                os.fchown(file.fileno(), 0, 0)

        def release(self):
            Path(self.path).unlink(missing_ok=True)

    vtorque_options = constant_hook(CARDS)
    vtorque_settings = constant_hook(Settings)
    vtorque_resources = constant_hook(Card)

    @hookimpl
    def vtorque_plan(guest, site):
        if guest[CARDS]:
            yield PoolClaim("acme", site[Settings].cards, guest[CARDS], key="cards")

    @hookimpl
    def vtorque_render_domain(guest):
        if guest.leased_items("acme"):
            yield MemoryBacking(nosharepages=True)

    @hookimpl
    def vtorque_pre_boot(job):
        for guest in job.guests:
            for card in guest.leased_items("acme"):
                job.acquire(Card(f"{job.site[Settings].place}/{card}"), guest=guest)
"""
CONFIG = '[plugin.acme]\ncards = ["a", "b"]\nplace = "{place}"\n[options.cards]\nmax = 2\n'


@pytest.fixture
def node(vtorque_plugin, vtorque_node, tmp_path):
    """Return a node with the plugin, whose cards are files in a directory of it."""
    plugins = vtorque_plugin(ACME, only=("linux-guest",))
    place = tmp_path / "node" / "cards"
    made = vtorque_node("one-socket", plugins, config=CONFIG.format(place=place))
    place.mkdir()
    return made


def test_plugin_answers_are_placed_and_rendered(node, vtorque_domain):
    on = node.planned
    (guest,) = on.guests(on.request("cards=2"))
    assert on.answers(guest) == [PoolClaim("acme", ("a", "b"), 2, key="cards")]
    (placed,) = on.place(guest)
    assert placed.leased_items("acme") == ("a", "b")
    assert MemoryBacking(nosharepages=True) in on.elements(placed)
    assert vtorque_domain(placed, on).find("memoryBacking/nosharepages") is not None
    assert [(what.path[-1], whose) for what, whose in on.pre_boot_resources(placed)] == [
        ("a", placed), ("b", placed),
    ]  # fmt: skip


def test_refusals_match_those_of_a_real_start(node):
    on = node.planned
    with pytest.raises(Refused, match=r"cards=3: .*limit: 2, set by \[options.cards\] max"):
        on.request("cards=3")
    with pytest.raises(NoFit, match="acme"):
        on.place(*on.guests(on.request("cards=2", "vms_per_node=2")))


def test_job_lives_and_survives_kills(node, vtorque_job, tmp_path):
    job = vtorque_job(node, cards="1", ram="128M")
    run = job.start()
    assert not run.error, run
    (card,) = (tmp_path / "node/cards").iterdir()
    assert stat.S_ISREG(card.stat().st_mode)
    assert len(node.domains()) == 1
    job.release()
    assert not list((tmp_path / "node/cards").iterdir())
    wanted = "acme-card"
    assert job.survive(lambda step: step.endswith(wanted)) == [
        f"before record {wanted}", f"after record {wanted}", f"before create {wanted}",
        f"after create {wanted}",
    ]  # fmt: skip


def test_directory_that_others_can_write_is_refused(node, vtorque_job, tmp_path):
    (tmp_path / "node/cards").chmod(0o777)
    run = vtorque_job(node, cards="1", ram="128M").start()
    assert "cards: can be written by others" in run.error
    node.release()


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_every_recorded_machine_can_be_used(name, vtorque_node, vtorque_plugin):
    node = vtorque_node(name, vtorque_plugin(ACME))
    assert node.planned.host.cpus
    assert (node.top / "sys/bus/pci/devices").is_dir() == bool(MACHINES[name].sysfs)


def test_guest_fields_can_be_overridden(vtorque_guest):
    assert vtorque_guest(vcpus=4).vcpus == 4
    assert vtorque_guest().hostname == "vn1"


def test_missing_xmllint_is_named_with_its_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssertionError, match="apt-get install libxml2-utils"):
        check_schema("<domain/>")
