"""vtorque-pinning with real guests: libvirt and the kernel agree on their CPUs and memory."""

import os
from pathlib import Path

import pytest

import running_jobs
from running_jobs import end, started
from vtorque_core.base.errors import EXIT_REFUSED, EXIT_USAGE

pytestmark = pytest.mark.e2e

PAGES = Path("/proc/sys/vm/nr_hugepages")  # of 2 MiB on x86


@pytest.fixture
def two_cpus(config):
    """Let guests have both CPUs of this node: none is reserved for QEMU's own threads."""
    if os.cpu_count() != 2:
        pytest.fail("these tests are written for a node of two CPUs")
    config("plugin.pinning", "emulator_cpu = false")


@pytest.mark.full
@pytest.mark.parametrize(
    ("pinning", "cpus"),
    [("true", ("0", "1")), ("my.map", ("1", "0"))],
    ids=["automatic", "map-file"],
)
def test_two_guests_run_on_different_cores(two_cpus, guest, pinning, cpus):
    guest.script("# rank 0, then rank 1\n1\n0 # the other\n", "my.map")
    (guest.home / "my.map").chmod(0o600)
    job = started(guest, "-vm", f"vcpu_pinning={pinning},vms_per_node=2,ram=128M")
    domains = running_jobs.domains(job)
    assert len(domains) == 2
    for domain, cpu in zip(domains, cpus, strict=True):
        assert running_jobs.table("vcpupin", domain) == [["0", cpu]]
        assert running_jobs.threads(domain)["CPU 0/TCG"] == cpu
    end(guest, job)


def test_emulator_runs_on_a_separate_cpu(guest):
    job = started(guest, "-vm", "vcpu_pinning=true,ram=128M")
    (domain,) = running_jobs.domains(job)
    threads = running_jobs.threads(domain)
    assert (threads["CPU 0/TCG"], threads["emulator"]) == ("0", "1")
    assert b"vcpu 0" in guest.root("vmgr", "ps", "--placement").stdout
    end(guest, job)
    full = guest.job("true\n", "-vm", "vcpu_pinning=true,vcpus=2,ram=128M")
    assert full.code == EXIT_REFUSED
    assert b"2 exclusive and 1 shared CPUs (3 in total) are more than the job can have" in full.err


def test_mapping_to_a_reserved_cpu_is_refused(two_cpus, guest, config):
    config("node", "host_reserve_cores = 1")
    guest.script("0\n", "my.map")
    result = guest.job("true\n", "-vm", "vcpu_pinning=my.map,ram=128M")
    assert (result.code, result.out) == (EXIT_REFUSED, b"")
    said = (
        b"vcpu_pinning=0: CPU 0 is reserved for the host "
        b"(limit: CPUs 1, set by [node] host_reserve_cores)"
    )
    assert said in result.err


def test_invalid_mapping_is_refused_at_submission(guest):
    guest.script("0\n1\n", "my.map")
    done = guest.job("true\n", "-vm", "vcpu_pinning=my.map,ram=128M").done
    assert done.returncode == EXIT_USAGE
    assert b"vcpu_pinning=my.map: line 2 is for no guest: a node has 1 guests" in done.stderr
    done = guest.job("true\n", "-vm", "vcpu_pinning=/etc/shadow,ram=128M").done
    assert done.returncode == EXIT_USAGE
    assert b"vcpu_pinning=/etc/shadow: cannot be read: Permission denied" in done.stderr


@pytest.mark.full
def test_job_waits_for_a_cpu_in_use_by_another_job(two_cpus, two_slots, guest):
    """The job stays queued, with the reason, until the other job has ended."""
    guest.script("1\n", "my.map")
    job = started(guest, "-vm", "vcpu_pinning=my.map,ram=128M")
    waiting = guest.submit("#!/bin/sh\necho ran\n", "-vm", "vcpu_pinning=my.map,ram=128M")
    reason = b"in use by other jobs: vcpu_pinning=1: CPU 1 is in use by another job"
    guest.wait_for(lambda: reason in guest.as_user("vmgr", "ps").stdout, what="the reason")
    assert guest.state_of(waiting) == "Q"
    (domain,) = running_jobs.domains(job)
    assert running_jobs.threads(domain)["CPU 0/TCG"] == "1"
    end(guest, job)
    guest.wait_for(lambda: guest.state_of(waiting) is None, what="the waiting job's end")
    assert (guest.home / "out").read_bytes() == b"ran\n"


@pytest.fixture
def pages():
    """Reserve 72 huge pages of 2 MiB."""
    before = PAGES.read_text()
    try:
        PAGES.write_text("72")
        there = int(PAGES.read_text())
    except OSError as error:
        pytest.skip(f"this kernel lets nobody set huge pages aside: {error}")
    if there < 72:
        PAGES.write_text(before)
        pytest.skip(f"this machine could set only {there} huge pages aside")
    yield
    PAGES.write_text(before)
    assert PAGES.read_text() == before


def test_guest_memory_is_in_huge_pages(pages, guest):
    job = started(guest, "-vm", "hugepages=2M,ram=128M")
    (domain,) = running_jobs.domains(job)
    maps = Path("/proc", running_jobs.pid(domain), "smaps").read_text().split("VmFlags")
    huge = [part for part in maps if "KernelPageSize:     2048 kB" in part]
    sizes = [int(part.split("Size:")[1].split()[0]) for part in huge]
    assert sizes == [128 * 1024]
    end(guest, job)


@pytest.fixture
def no_pages():
    """Reserve no huge page, whatever this machine has."""
    before = PAGES.read_text()
    if int(before):
        PAGES.write_text("0")
    yield
    if int(before):
        PAGES.write_text(before)


@pytest.mark.full
def test_missing_huge_pages_are_refused(no_pages, guest, config):
    lack = guest.job("true\n", "-vm", "hugepages=1G,ram=1G")
    assert (lack.code, lack.out) == (EXIT_REFUSED, b"")
    assert b"hugepages=1G: node " in lack.err
    assert b"(set by [plugin.pinning] required = true)" in lack.err
    running_jobs.runs_without(guest, config, "pinning", "hugepages=true")
