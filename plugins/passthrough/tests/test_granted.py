"""Cards that a batch system counts: requests, and use of granted cards only.

/dev/null and /dev/zero stand for the device files of two GPUs on a recorded machine.
"""

import os
from pathlib import Path

import pytest

from vtorque_core.api import ConfigError, HostFault, Refusal, Refused
from vtorque_core.api.batch_system import Grant
from vtorque_core.api.claims import PoolClaim
from vtorque_passthrough import node, plugin
from vtorque_passthrough.device_files import function_of_file, function_of_number
from vtorque_testing import planned
from vtorque_testing.sysfs_tree import tree, write

PLUGINS = planned.load_with_core("passthrough", plugin, node)
FIRST, SECOND = "0000:3b:00.0", "0000:5e:00.0"
FILES = {"/dev/null": FIRST, "/dev/zero": SECOND, "/dev/full": "0000:86:00.0"}
GPU = """
[[plugin.passthrough.classes]]
name = "gpu"
ids = ["10de:20b0"]
resource = "gres/gpu"
files = ["/dev/null", "/dev/zero"]
"""
BLIND = GPU.partition("files")[0]


def site_of(top, classes=GPU):
    sysfs = Path(tree("gpu-node", top / "sys"))
    for file, address in FILES.items():
        made = os.stat(file)  # noqa: PTH116
        at = sysfs / "devices" / address / "drm" / Path(file).name
        at.mkdir(parents=True)
        link = sysfs / "dev/char" / f"{os.major(made.st_rdev)}:{os.minor(made.st_rdev)}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(at)
    text = f'[plugin.passthrough]\nsysfs = "{sysfs}"\n{classes}'
    return planned.PlannedNode.make(PLUGINS, text, "gpu")


@pytest.fixture
def site(tmp_path):
    return site_of(tmp_path)


def words(pci, count=1):
    return (*([f"pci={pci}"] if pci else []), f"vms_per_node={count}")


def answers_of(site, pci, granted, count=1):
    first, *_ = site.guests(site.request(*words(pci, count)), granted=granted)
    return site.answers(first)


def items(site, pci, granted, count=1):
    (claim,) = answers_of(site, pci, granted, count)
    assert isinstance(claim, PoolClaim), claim
    return claim.items


def gpus(*devices, count=None):
    return {"gres/gpu": Grant(len(devices) if count is None else count, devices)}


# -- Requested cards -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pci", "count", "wanted"), [("gpu:2", 1, 2), ("gpu", 3, 3), ("gpu:2", 2, 4), ("", 1, None)]
)
def test_vsub_requests_the_cards_of_all_guests_of_a_node(site, pci, count, wanted):
    found = site.needs(*words(pci, count))
    assert dict(found.resources) == ({} if wanted is None else {"gres/gpu": wanted})
    assert not found.licenses


def test_class_without_a_resource_requests_and_checks_nothing(tmp_path):
    site = site_of(tmp_path, BLIND.partition("resource")[0])
    assert not site.needs("pci=gpu:2").resources
    assert items(site, "gpu", {}) == (FIRST, SECOND)
    assert items(site, "gpu", None) == (FIRST, SECOND)


def test_user_request_smaller_than_the_guests_need_is_refused(site):
    site.needs("pci=gpu:2", asked={"gres/gpu": 2})
    site.needs("pci=gpu:2", asked={"gres/fpga": 1})
    with pytest.raises(Refused, match=r"need 2 gres/gpu, but the job requests 1.*request more"):
        site.needs("pci=gpu:2", asked={"gres/gpu": 1})


# -- Granted cards ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "expected"), [((0,), {FIRST}), ((1,), {SECOND}), ((0, 1), {FIRST, SECOND})]
)
def test_guest_gets_only_granted_cards(site, devices, expected):
    assert set(items(site, "gpu", gpus(*devices))) == expected


def test_guests_of_a_node_share_granted_cards(site):
    assert items(site, "gpu", gpus(0, 1), count=2) == (FIRST, SECOND)


@pytest.mark.parametrize("granted", [{}, gpus(), {"gres/fpga": Grant(2, (0, 1))}])
def test_missing_grant_is_refused_with_a_fix(site, granted):
    (answer,) = answers_of(site, "gpu", granted)
    assert isinstance(answer, Refusal)
    assert "need 1 gres/gpu, but the batch system granted the job 0" in str(answer)
    assert "submit with vsub" in str(answer)


def test_cards_of_all_guests_of_a_node_are_counted(site):
    (answer,) = answers_of(site, "gpu", gpus(1), count=2)
    assert "need 2 gres/gpu, but the batch system granted the job 1" in str(answer)


def test_batch_system_without_grants_leaves_cards_to_the_ledger(site):
    assert items(site, "gpu", None) == (FIRST, SECOND)


def test_cards_without_known_numbers_are_refused(site):
    with pytest.raises(
        Refused,
        match="the batch system does not report which gres/gpu of node n1 are exclusive",
    ):
        answers_of(site, "gpu", gpus(count=1))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            '["/dev/null"]',
            r"number 1 \('files' of class gpu\) is not a known card",
        ),
        (
            '["/dev/null", "/dev/missing"]',
            r"number 1 \('files' of class gpu\) is not a known card",
        ),
        (
            '["/dev/null", "/dev/random"]',
            r"number 1 \('files' of class gpu\) is not a known card",
        ),
        ('["/dev/null", "/dev/full"]', "n1 has no 1 PCI cards of class.*the job holds gres/gpu"),
    ],
)
def test_device_files_that_do_not_match_the_node_are_a_host_fault(tmp_path, files, message):
    other = '[[plugin.passthrough.classes]]\nname = "other"\nids = ["10de:2204", "10de:1aef"]\n'
    site = site_of(tmp_path, f"{BLIND}files = {files}\n{other}")
    assert items(site, "gpu", gpus(0)) == (FIRST,)
    with pytest.raises(HostFault, match=message):
        answers_of(site, "gpu", gpus(1))


def test_group_with_an_ungranted_card_is_a_fault_without_blame(tmp_path):
    site = site_of(tmp_path)
    second = Path(site.site[plugin.Settings].sysfs, "devices", SECOND, "iommu_group")
    second.unlink()
    second.symlink_to(second.parents[2] / "kernel/iommu_groups/17")
    with pytest.raises(HostFault, match="number 0 shares its IOMMU group with number 1"):
        answers_of(site, "gpu", gpus(0))
    assert items(site, "gpu", gpus(0, 1)) == (FIRST,)
    with pytest.raises(HostFault, match="has no 2 PCI cards") as raised:
        answers_of(site, "gpu:2", gpus(0, 1))
    assert not raised.value.blames_node, "a user's request could drain the node"


def test_broken_granted_card_blames_the_node(site):
    Path(site.site[plugin.Settings].sysfs, "devices", FIRST, "reset").unlink()
    with pytest.raises(
        HostFault, match=r"0000:3b:00.0 cannot be reset, and its classes do not set allow_no_reset"
    ) as raised:
        answers_of(site, "gpu", gpus(0))
    assert raised.value.blames_node


def test_cards_without_files_must_have_no_host_driver(tmp_path):
    site = site_of(tmp_path, BLIND)
    with pytest.raises(
        HostFault,
        match="is bound to the host's driver nvidia, so jobs without guests may use it: bind it",
    ):
        answers_of(site, "gpu", gpus(count=1))
    sysfs = Path(site.site[plugin.Settings].sysfs)
    driver = sysfs / "devices" / SECOND / "driver"
    driver.unlink()
    driver.symlink_to(sysfs / "bus/pci/drivers/vfio-pci")
    assert items(site, "gpu", gpus(count=1)) == (SECOND,)
    (sysfs / "devices" / FIRST / "driver").unlink()
    assert items(site, "gpu", gpus(count=1)) == (FIRST, SECOND)


def test_guests_get_granted_cards_of_their_type(tmp_path):
    typed = GPU.replace("gres/gpu", "gres/gpu:a100").replace('zero"', 'zero", "/dev/full"')
    other = typed.replace('"gpu"', '"render"').replace("a100", "rtx")
    other = other.replace('"10de:20b0"', '"10de:2204", "10de:1aef"')
    site = site_of(tmp_path, typed + other)
    granted = {"gres/gpu:a100": Grant(1, (1,)), "gres/gpu:rtx": Grant(1, (2,))}
    one, two = answers_of(site, "render:1+gpu:1", granted | {"gres/gpu": Grant(2, (1, 2))})
    assert (one.items, two.items) == ((SECOND,), ("0000:86:00.0",))


# -- Device files ----------------------------------------------------------------------------------


def test_device_file_leads_to_its_pci_function(site, tmp_path):
    sysfs = site.site[plugin.Settings].sysfs
    assert {file: function_of_file(file, sysfs) for file in FILES} == FILES
    link = tmp_path / "by-path"
    link.symlink_to("/dev/zero")
    assert function_of_file(str(link), sysfs) == SECOND
    (tmp_path / "plain").touch()
    assert [function_of_file(str(tmp_path / name), sysfs) for name in ("plain", "missing")] == [
        "",
        "",
    ]


def test_doctor_prints_the_card_of_each_number(site):
    said = [result.message for result in node.check(site.site)]
    assert said[-2:] == [
        f"gres/gpu number 0 is {FIRST} (/dev/null)",
        f"gres/gpu number 1 is {SECOND} (/dev/zero)",
    ]


def test_vfio_group_file_leads_to_its_first_function(site):
    sysfs = Path(site.site[plugin.Settings].sysfs)
    made = os.stat("/dev/random")  # noqa: PTH116
    write(sysfs / "devices/virtual/vfio/40/uevent", "")
    at = sysfs / "dev/char" / f"{os.major(made.st_rdev)}:{os.minor(made.st_rdev)}"
    at.symlink_to(sysfs / "devices/virtual/vfio/40")
    assert function_of_file("/dev/random", str(sysfs)) == "0000:86:00.0"


def test_nvidia_driver_maps_numbers_to_cards(tmp_path):
    """sysfs has no entries of NVIDIA's devices."""
    for number, address in enumerate((SECOND, FIRST)):
        text = f"Model: \t\t NVIDIA A100\nBus Location: \t {address}\nDevice Minor: \t {number}\n"
        write(tmp_path / address / "information", text)
    found = [function_of_number(195, n, "/nowhere", tmp_path) for n in range(3)]
    assert found == [SECOND, FIRST, ""]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('resource = "gres/gpu 1"', "is not in the form gres/gpu or ngpus"),
        ('resource = "--exclusive"', "is not in the form gres/gpu or ngpus"),
        ('resource = "gres/gpu,x"', "is not in the form gres/gpu or ngpus"),
        ('files = ["/dev/null"]', "the key 'files' requires the key 'resource'"),
    ],
)
def test_invalid_class_is_a_config_error(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        site_of(tmp_path, BLIND.partition("resource")[0] + more)
