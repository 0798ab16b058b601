"""Whole starts: from the allocation of a job to the hardware of its guests."""

import json
import types
from xml.etree import ElementTree

import pytest

import sparing
from tests.support import device_cases
from vtorque_core.api import hookimpl


@pytest.mark.parametrize(
    ("share", "pairs", "vcpus", "mib"),
    sparing.each(
        2,
        [
            ({"cpus": (2, 3, 4), "mem_mib": 4096}, {}, 3, 3840),
            ({"cpu_count": 6, "mem_mib": 4096}, {}, 6, 3840),
            ({"cpu_count": 7, "mem_mib": 4096}, {"vms_per_node": "2"}, 3, 1792),
            ({"cpu_count": 6, "mem_mib": 4096}, {"vcpus": "2", "ram": "512M"}, 2, 512),
            ({}, {}, 1, 1024),
        ],
    ),
)
def test_domains_are_as_large_as_the_allocation(share, pairs, vcpus, mib, tmp_path):
    node = device_cases.node(tmp_path, device_cases.load([]), device_cases.Case({}), share=share)
    run = node.start(node.job(pairs))
    assert not run.error, run
    domains = [ElementTree.fromstring(xml) for xml in node.domains()]  # noqa: S314 - our own
    assert len(domains) == int(pairs.get("vms_per_node", "1"))
    for domain in domains:
        memory = domain.find("memory")
        assert memory.get("unit") == "MiB"
        assert (domain.findtext("vcpu"), memory.text) == (str(vcpus), str(mib))
    node.release()


def test_allocation_too_small_for_the_image_is_refused_with_the_needed_memory(tmp_path):
    share = {"cpu_count": 2, "mem_mib": 270}
    node = device_cases.node(tmp_path, device_cases.load([]), device_cases.Case({}), share=share)
    run = node.start(node.job({}))
    assert "needs more RAM" in str(run.error)
    assert "ask the batch system for 320M of memory on each node" in str(run.error)


def test_pre_boot_hooks_get_names_and_slots_of_all_guests(tmp_path):
    told = tmp_path / "told"  # the start runs in another process

    @hookimpl
    def vtorque_pre_boot(job):
        told.write_text(json.dumps([(guest.hostnames, guest.slots) for guest in job.guests]))

    module = types.ModuleType("acme")
    module.vtorque_pre_boot = vtorque_pre_boot
    plugins = device_cases.load([])
    plugins.register("acme", module, "vtorque-acme 1.0.0")
    share = {"cpu_count": 4, "mem_mib": 4096}
    node = device_cases.node(tmp_path, plugins, device_cases.Case({}), share=share)
    run = node.start(node.job({"vms_per_node": "2"}))
    assert not run.error, run
    first, second = json.loads(told.read_text())
    assert first == second
    assert len({*first[0]}) == 2 and first[1] == [2, 2]
    node.release()
