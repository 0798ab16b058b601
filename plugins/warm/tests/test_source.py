"""Offers of warm guests to the guests of a job."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from vtorque_core.api.boot_source import RenderedGuest
from vtorque_core.api.claims import Placement
from vtorque_core.api.guest_driver import GuestDriver, WarmDriver
from vtorque_core.live import spares
from vtorque_core.live.spares import WarmGuest
from vtorque_testing import planned
from vtorque_warm import node


@pytest.fixture(autouse=True)
def waiting_guests(tmp_path, monkeypatch):
    """Let two guests wait, the second of which matches."""
    found = []
    for key, xml in (("spare-1.0", "<other/>"), ("spare-2.0", "<fits/>")):
        place = tmp_path / key
        place.mkdir()
        (place / "base.xml").write_text(xml)
        found.append(WarmGuest(key, "vt", True, 0.0, 256, "", "u", "test:///default", place))
    (tmp_path / "spare-1.0.jsonl").touch()
    monkeypatch.setattr(spares, "warm_guests", lambda _: found)
    return found


@pytest.fixture
def offer_guests(tmp_path):
    site = SimpleNamespace(paths=SimpleNamespace(journal=tmp_path))

    def offers(driver=WarmDriver, **changes):
        kind = mock.create_autospec(driver, instance=True)
        guest = RenderedGuest(planned.guest_plan(**changes), kind, lambda: "<fits/>")
        found = node.vtorque_rendered_sources(guests=[guest], site=site)
        return [(each.index, each.source.warm_key) for each in found]

    return offers


def test_warm_guest_with_the_same_domain_is_offered(offer_guests, waiting_guests):
    assert offer_guests(index=3) == [(3, "spare-2.0")]
    Path(waiting_guests[1].directory / "base.xml").unlink()
    assert offer_guests() == []


def test_guest_with_dedicated_cores_gets_no_offer(offer_guests):
    assert offer_guests(placement=Placement({"vcpu": (1,)}, own=frozenset({"vcpu"}))) == []


def test_guest_of_a_driver_without_warm_support_gets_no_offer(offer_guests):
    assert offer_guests(GuestDriver) == []


def test_claimed_or_booting_warm_guest_is_not_offered(offer_guests, waiting_guests):
    fits = waiting_guests.pop()
    waiting_guests += [replace(fits, job="7"), replace(fits, waits=False)]
    assert offer_guests() == []
