"""Whole starts on a recorded machine: each guest has its job's granted card.

libvirt, nft and the kernel's binding of drivers are doubles; the rest is a node's real code.
"""

import dataclasses
import os
import re
from pathlib import Path

import device_cases
from vtorque_core.api.batch_system import Grant
from vtorque_testing import sysfs_tree

CARDS = ("0000:3b:00.0", "0000:5e:00.0")
FILES = ("/dev/null", "/dev/zero")  # stand for their device files
GPU = {"name": "gpu", "ids": ["10de:20b0"], "resource": "ngpus", "files": list(FILES)}
CASE = device_cases.Case(
    {"pci": "gpu:1", "vcpus": "1", "ram": "128M"}, {"passthrough": {"classes": [GPU]}}
)


def machine(top):
    sysfs_tree.tree("gpu-node", top)
    for file, address in zip(FILES, CARDS, strict=True):
        number = os.stat(file).st_rdev  # noqa: PTH116
        link = top / "dev/char" / f"{os.major(number)}:{os.minor(number)}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(top / "devices" / address)


def started(node, job_id, *devices, **keys):
    job = node.job({**CASE.pairs, **keys}, job_id)
    granted = {"ngpus": Grant(len(devices), devices)}
    return node.start(dataclasses.replace(job, granted=granted))


def cards_of(node):
    found = r'<source>\s*<address .*?bus="0x(..)"'
    return {tuple(re.findall(found, xml)) for xml in node.domains()}


def test_each_job_gets_its_granted_cards_in_any_start_order(tmp_path):
    node = device_cases.node(tmp_path, device_cases.load(["passthrough"]), CASE, sysfs=machine)
    assert not started(node, "1", 1).error
    assert cards_of(node) == {("5e",)}
    assert not started(node, "2", 0).error
    assert cards_of(node) == {("5e",), ("3b",)}
    for job_id in ("1", "2"):
        node.release(job_id)
    assert cards_of(node) == set()
    for address in CARDS:
        driver = Path(tmp_path, "sys/devices", address, "driver")
        assert driver.readlink().name == "nvidia", "the card does not have its host driver again"


def test_card_in_use_by_the_previous_job_is_awaited(tmp_path):
    """The card is granted while its last guest is being destroyed; no other card may be used."""
    node = device_cases.node(tmp_path, device_cases.load(["passthrough"]), CASE, sysfs=machine)
    assert not started(node, "1", 0).error
    late = started(node, "2", 0)
    assert late.kind == "InUse", late
    node.release("2")
    node.release("1")
    assert not started(node, "2", 0).error
    assert cards_of(node) == {("3b",)}
    node.release("2")


def test_two_guests_of_a_job_get_two_granted_cards(tmp_path):
    node = device_cases.node(tmp_path, device_cases.load(["passthrough"]), CASE, sysfs=machine)
    few = started(node, "1", 1, vms_per_node="2")
    assert "need 2 ngpus, but the batch system granted the job 1" in few.error
    node.release()
    assert not started(node, "2", 0, 1, vms_per_node="2").error
    assert cards_of(node) == {("3b",), ("5e",)}
    node.release("2")
