"""SCAM on a node that cannot partition its caches: a refusal, or a warning."""

import platform
from xml.etree import ElementTree

import pytest

import running_jobs
from vtorque_core.base.errors import EXIT_REFUSED

pytestmark = pytest.mark.e2e

LACKS = f"node {platform.node()} has no cache allocation (resctrl, L3)"


@pytest.fixture
def required(guest):
    """Return a function that sets ``[plugin.scam] required`` until the test ends."""
    own = guest.config.read_text()

    def set_(value):
        guest.config.write_text(f"{own}\n[plugin.scam]\nrequired = {str(value).lower()}\n")

    yield set_
    guest.config.write_text(own)


def test_job_is_refused_if_it_cannot_be_protected(guest, required):
    required(True)
    result = guest.job("#!/bin/sh\necho ran\n", "-vm", "scam=true")
    assert (result.code, result.out) == (EXIT_REFUSED, b"")
    said = result.err.decode()
    assert f"scam=true: {LACKS} (set by [plugin.scam] required = true)" in said
    assert "leave out scam" in said


@pytest.mark.full
def test_job_runs_with_partial_protection_and_a_warning(guest, required):
    required(False)
    job = guest.submit(
        "#!/bin/sh\ntouch up\nwhile [ ! -e stop ]; do sleep 0.1; done\n",
        "-vm", "scam=true,vms_per_node=2",
    )  # fmt: skip
    try:
        guest.wait_for((guest.home / "up").exists, what="the job's start")
        names = running_jobs.domains(job)
        cores = []
        for name in names:
            domain = ElementTree.fromstring(running_jobs.virsh("dumpxml", name))  # noqa: S314
            assert domain.find("memoryBacking/nosharepages") is not None
            assert domain.find("cputune/cachetune") is None
            cores.append(running_jobs.threads(name)["CPU 0/TCG"])
        assert len(names) == 2
        assert len(set(cores)) == 2
        assert all(core.isdecimal() for core in cores), cores
    finally:
        (guest.home / "stop").touch()
        guest.wait_for(lambda: guest.state_of(job) in (None, "C"), what="the job's end")
    first, *others = (guest.home / "err").read_text().splitlines()
    assert f"warning: runs without scam=true: {LACKS}" in first
    assert "the guest still has its own cores and memory pages" in first
    assert not others


@pytest.mark.full
def test_job_without_the_option_gets_no_warning(guest, required):
    required(True)
    result = guest.job("#!/bin/sh\necho ran\n")
    assert (result.code, result.out, result.err) == (0, b"ran\n", b"")
