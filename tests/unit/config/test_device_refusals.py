"""Refused requests: each refusal names the key, the value, the limit and where that is set.

The steps of a job: those of ``vsub`` at submission, then the node's start on a recorded machine.
"""

import json
import re

import pytest

import device_cases
from device_cases import CAPABILITIES, DEVICES, Case, load, together
from vtorque_core.api.values import FileData
from vtorque_core.base.errors import Refused
from vtorque_core.config.policy import check_share, decide, needs
from vtorque_core.config.request import make_request

pytestmark = pytest.mark.e2e

ARM = (CAPABILITIES / "arm-4x32.xml").read_text()
TWO_FROM_HOST = b"0,2\n"
AT_VSUB, ON_NODE = "vsub", "the node"
RESERVED = {"node": {"host_reserve_cores": 2}}


def request_of(node, pairs, files=()):
    """Check the user's keys like vsub; return the request. Raises Refused."""
    plugins = node.plugins
    for name, content in files:
        (node.top / name).write_bytes(content)
    request = make_request(pairs, plugins.options(), None)
    wanted = decide(request, node.site, plugins)
    check_share(needs(wanted, node.site, plugins), None, None)
    return request


BAD = [
    # min > max
    ("iocm=true,iocm_min_cores=3,iocm_max_cores=2", {}, AT_VSUB,
     r"iocm_min_cores=3: is more than iocm_max_cores.*limit: "),
    ("iocm=true,iocm_min_cores=0", {}, AT_VSUB, r"iocm_min_cores=0: .*limit: 1 or more"),
    ("iocm_min_cores=2", {}, AT_VSUB, r"iocm_min_cores=2: needs iocm=true"),
    # more cores than exist, or than the site allows
    ("iocm=true,iocm_min_cores=5", {}, ON_NODE,
     r"iocm_min_cores=5: is more than allowed \(limit: 4, set by \[plugin.iocm\] max_cores"),
    ("iocm=true,iocm_min_cores=3", {"options": {"iocm_min_cores": {"max": 2}}}, AT_VSUB,
     r"iocm_min_cores=3: .*limit: 2, set by \[options.iocm_min_cores\] max in"),
    ("vcpus=200,vcpu_pinning=true", {}, ON_NODE,
     r"vcpu_pinning=20.: .*exclusive CPUs.*limit: 24 CPUs.*the job's allocation"),
    ("vcpus=200,scam=true", {}, ON_NODE, r"scam=200: 200 exclusive CPUs.*limit: 24 CPUs"),
    ("vcpus=9,vms_per_node=3,vcpu_pinning=true", {}, ON_NODE,
     r"vcpu_pinning=9: 27 exclusive CPUs.*limit: 24 CPUs, set by the job's allocation"),
    # a pin file with the host's cores, without cores, with too few, or with other jobs' cores
    ("vcpus=2,vcpu_pinning=host", RESERVED, ON_NODE,
     r"vcpu_pinning=0,2: CPU 0 is reserved for the host "
     r".*limit: CPUs .*\[node\] host_reserve_cores"),
    ("vcpus=2,vcpu_pinning=far", {}, ON_NODE,
     r"vcpu_pinning=2,500: CPU 500 is not on this node \(limit: CPUs 0,"),
    ("vcpus=3,vcpu_pinning=host", {}, AT_VSUB,
     r"vcpu_pinning=host: line 1 has 2 CPUs for 3 vCPUs"),
    ("vcpus=2,vcpu_pinning=words", {}, AT_VSUB, r"vcpu_pinning=words: line 1 is not a list of num"),
    ("vcpus=2,vcpu_pinning=host", {"plugin": {"pinning": {"user_files": False}}}, AT_VSUB,
     r"vcpu_pinning=host: .*not allowed on this site.*true, false.*\[plugin.pinning\] user_files"),
    ("vcpus=2,vcpu_pinning=host", {"options": {"vcpu_pinning": {"allow": [True, False]}}}, AT_VSUB,
     r"vcpu_pinning=host: .*limit: true, false, set by \[options.vcpu_pinning\] allow in"),
    # page sizes that do not exist, or do not divide the guest's RAM
    ("ram=65M,hugepages=2M", {}, AT_VSUB, r"hugepages=2M: .*not a multiple.*limit: ram=65M"),
    ("ram=64M,hugepages=1G", {}, AT_VSUB, r"hugepages=1G: .*not a multiple.*limit: ram=64M"),
    ("hugepages=3M", {}, AT_VSUB, r"hugepages=3M: is not a size of huge pages"),
    ("numa=one", {}, AT_VSUB, r"numa=one: .*write preferred or strict"),
    ("ram=300G,numa=strict", {}, ON_NODE, r"numa=strict: .*must fit on one NUMA node.*limit: "),
    # raw PCI addresses, unknown classes
    ("pci=0000:3b:00.0", {}, AT_VSUB, r"pci=0000:3b:00.0: contains 0000:3b:00.0, a PCI"),
    ("pci=3b:00.0", {}, AT_VSUB, r"pci=3b:00.0: contains 3b:00.0, a PCI address"),
    ("pci=10de:20b0", {}, AT_VSUB, r"pci=10de:20b0: contains 10de:20b0, a PCI address or device"),
    ("pci=gpu:0", {}, AT_VSUB, r"pci=gpu:0: is not a list of cards"),
    ("pci=gpu:../../x", {}, AT_VSUB, r"pci=gpu:../../x: is not a list of cards"),
    ("pci=fpga:1", {}, AT_VSUB,
     r"pci=fpga:1: unknown class fpga \(limit: gpu, set by \[plugin.passthrough\] classes"),
    ("pci=gpu:5", {}, ON_NODE, r"pci=gpu:5: node n1 has no 5 PCI cards of class gpu"),
    ("pci=gpu:2", {"options": {"pci": {"allow": ["gpu:1"]}}}, AT_VSUB,
     r"pci=gpu:2: is not allowed \(limit: gpu:1, set by \[options.pci\] allow in"),
    # shared memory of 3M, and more than the site allows or the job has
    ("unclot=true,unclot_shmem=3M", {}, AT_VSUB,
     r"unclot_shmem=3M: is not a power of two.*2M or 4M"),
    ("unclot=true,unclot_shmem=1G", {"options": {"unclot_shmem": {"max": "64M"}}}, AT_VSUB,
     r"unclot_shmem=1G: is more than allowed \(limit: 64M, set by \[options.unclot_shmem\] max in"),
    ("ram=1G,unclot=true,unclot_shmem=1T", {}, ON_NODE,
     r"unclot_shmem=1T: .*more than the node's memory.*limit: 320G"),
    ("unclot=true,unclot_shmem=1T", {}, ON_NODE,  # nothing is left for ram=job
     r"ram=1M: .*needs more RAM.*ask the batch system for 1048896M of memory on each node"),
    ("unclot_shmem=64M", {}, AT_VSUB, r"unclot_shmem=64M: requires unclot=true; add unclot=true"),
    # invalid words
    *((f"{key}=maybe", {}, AT_VSUB, rf"{key}=maybe: .*true or false")
      for key in ("iocm", "scam", "unclot", "vrdma")),
]  # fmt: skip
FILES = {"host": TWO_FROM_HOST, "far": b"2,500", "words": b"; rm -rf /"}


SITES = [tables for n, (_, tables, *_) in enumerate(BAD) if tables not in [b[1] for b in BAD[:n]]]


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("tables", SITES, ids=str)
def test_bad_input_is_refused_with_the_limit(tables, stride, tmp_path, monkeypatch):
    case = together()
    settings = {k: {**case.settings.get(k, {}), **v} for k, v in tables.get("plugin", {}).items()}
    others = {name: table for name, table in tables.items() if name != "plugin"}
    case = Case({}, {**case.settings, **settings})
    node = device_cases.node(tmp_path / "node", load(), case, tables=others)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    before = node.observe()
    for text, _, by, says in [row for row in BAD if row[1] == tables][::stride]:
        pairs = [tuple(pair.split("=", 1)) for pair in text.split(",")]
        assert_refused(node, pairs, by, says)
        assert node.observe() == before, text


def assert_refused(node, pairs, by, says):
    try:
        request = request_of(node, pairs)
    except Refused as error:
        at, said = AT_VSUB, str(error)
        # A user who bypasses vsub gets no further: the node decides again.
        forged = {k: v for k, v in pairs if v not in FILES}
        files = {k: FileData(v, FILES[v]) for k, v in pairs if v in FILES}
        run = node.start(node.job(forged, files=files))
    else:
        at = ON_NODE
        run = node.start(node.job(dict(request.pairs), files=request.files))
        said = run.error
    assert run.kind == "Refused", run
    assert (at, run.error) == (by, said)
    assert re.search(says, said), said
    node.release()


def test_pci_function_of_two_plugins_is_leased_once(tmp_path):
    """A site may offer by class what vrdma leases: a reset would affect the other guest."""
    classes = [{"name": "nic", "ids": ["15b3:101c"]}]
    case = Case({}, {**together().settings, "passthrough": {"classes": classes}})
    node = device_cases.node(tmp_path / "node", load(), case)
    addresses = []
    for number, pairs in enumerate([{"vrdma": "true"}, {"pci": "nic:2"}, {"vrdma": "true"}]):
        run = node.start(node.job(pairs, str(number)))
        assert not run.error, run
        addresses = [a for xml in node.domains() for a in re.findall(r'bus="0x5e".*?/>', xml)]
    assert len(addresses) == len(set(addresses)) == 4
    run = node.start(node.job({"pci": "nic:1"}, "3"))
    assert (run.kind, "in use by other jobs: pci=1" in run.error) == ("InUse", True)
    for number in range(4):
        node.release(str(number))


# -- Hardware that a node lacks --------------------------------------------------------------------

SRIOV = [{"kind": "sriov"}]
LACKING = {
    "passthrough": [
        ("pci=gpu:1", {}, "bare", "PCI cards of class gpu"),
        ("pci=gpu:1", {}, "no-iommu", "IOMMU"),
    ],
    "vrdma": [
        ("vrdma=true", {"backends": SRIOV, "cards": ["ib0"]}, "bare", "IOMMU"),
        ("vrdma=true", {"backends": SRIOV, "cards": ["x"]}, "gpu-node", "virtual function"),
        ("vrdma=true", {"backends": [{"kind": "hyv"}]}, "bare", "kernel module vhost_hyv"),
        ("vrdma=true", {"backends": [{"kind": "rxe", "nodes": "m.*"}]}, "bare", "RDMA"),
    ],
    "scam": [("scam=true", {}, "bare", r"cache allocation \(resctrl, L3\)")],
    "iocm": [
        ("iocm=true", {"enabled": False}, "bare", r"I/O cores \(\[plugin.iocm\] enabled"),
        ("iocm=true", {"nodes": "m.*"}, "bare", r"I/O cores .*\[plugin.iocm\] nodes = 'm"),
    ],
    "pinning": [("hugepages=1G,ram=1G", {}, "bare", "free huge pages for 1G")],
    "unclot": [],  # needs no hardware
}
ROWS = [
    pytest.param(name, *row, marks=[pytest.mark.full] if number else [])
    for name, rows in LACKING.items()
    for number, row in enumerate(rows)
]


def test_every_device_plugin_has_a_case_of_missing_hardware():
    assert set(DEVICES) <= set(LACKING)


def bare_node(top, name, settings, sysfs):
    """Return a machine without resctrl, with this PCI hardware only."""
    case = Case({}, {name: {**device_cases.CASES[name].settings.get(name, {}), **settings}})
    options = {}
    if sysfs == "bare":
        options["sysfs"] = lambda path: path.mkdir()
    else:
        options["sysfs"] = lambda path: device_cases.sysfs_tree.tree(sysfs, path)
    return device_cases.node(top, load([name]), case, machine=ARM, **options)


@pytest.mark.parametrize(("name", "text", "settings", "sysfs", "lacks"), ROWS)
def test_missing_hardware_is_named_with_its_node(name, text, settings, sysfs, lacks, tmp_path):
    pairs = dict(pair.split("=", 1) for pair in text.split(","))
    key, value = next(iter(pairs.items()))
    strict = bare_node(tmp_path / "strict", name, {**settings, "required": True}, sysfs)
    run = strict.start(strict.job(pairs))
    wanted = rf"^{key}={value}: node n1 has no .*{lacks}.*\[plugin.{name}\] required = true"
    assert run.kind == "Refused"
    assert len(run.error.splitlines()) == 1
    assert re.search(wanted, run.error), run.error
    strict.release()
    lax = bare_node(tmp_path / "lax", name, {**settings, "required": False}, sysfs)
    run = lax.start(lax.job(pairs))
    assert not run.error, run
    assert len(lax.domains()) == 1
    (told,) = json.loads(lax.site.paths.proof("1").read_text())["detail"]
    without = rf"^runs without {key}={value}: node n1 has no .*{lacks}"
    assert re.search(without, told), told
    lax.release()
