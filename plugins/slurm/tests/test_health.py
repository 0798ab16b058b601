"""Doctor's check of Slurm's memory and that of warm guests, with doubles of commands."""

import os
from types import SimpleNamespace

import pytest

from slurm_doubles import SlurmDoubles
from vtorque_slurm import health, plugin
from vtorque_slurm.settings import Settings

HAS = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20  # MiB


@pytest.fixture
def run_check(tmp_path, monkeypatch):
    """Return a function that runs the check with this much in guests, and this much for jobs."""
    slurm = SlurmDoubles(tmp_path)

    def look(*guests, system="slurm", uid=0, **node):
        slurm.node(**node)
        found = [SimpleNamespace(mib=mib, job=job) for mib, job in guests]
        monkeypatch.setattr(health.spares, "warm_guests", lambda _: found)
        batch = SimpleNamespace(name=system)
        monkeypatch.setattr(health.service, "batch_system", lambda _: (None, batch))
        monkeypatch.setattr(health.os, "geteuid", lambda: uid)
        site = SlurmOnlySite(path=None, paths=None, settings=Settings(bindir=str(slurm.bin)))
        check, _ = plugin.vtorque_health_checks()
        return list(check.check(site))

    return look


class SlurmOnlySite(SimpleNamespace):
    """A site with the settings of one plugin."""

    def __getitem__(self, _):
        return self.settings


def test_node_that_offers_all_memory_with_warm_guests_is_a_warning(run_check):
    (found,) = run_check((512, ""), (256, ""), (512, "7"), memory=HAS)
    assert found.status == "warning"
    assert f"offers {HAS} MiB of this node's {HAS} MiB, and warm guests use 768" in found.message
    assert found.fix.startswith("set MemSpecLimit=768 ")


@pytest.mark.parametrize(
    "node",
    [{"memory": HAS - 512}, {"memory": HAS, "reserve": "   CoreSpecCount=1 MemSpecLimit=512\n"}],
)
def test_memory_reserved_for_warm_guests_is_ok(run_check, node):
    (found,) = run_check((512, ""), **node)
    assert found.status == "ok"


@pytest.mark.parametrize(
    ("guests", "more"),
    [([], {}), ([(512, "7")], {}), ([(512, "")], {"system": "local"}), ([(512, "")], {"uid": 7})],
)
def test_node_without_warm_guests_has_no_result(run_check, guests, more):
    assert run_check(*guests, **more, memory=HAS) == []
