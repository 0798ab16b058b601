"""Domains of guests with any combination of device options, all plugins installed.

Each is rendered by the real start of a job, placed by the real ledger on a recorded machine. It
has to be valid by libvirt's schema, and libvirt's test driver has to accept it (VALIDATE).
"""

import dataclasses
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

import device_cases
import pairwise
from device_cases import CASES, DEVICES, MORE, NEEDED, VALUES, load
from vtorque_core.api import hooks
from vtorque_core.api.host_topology import parse_cpus
from vtorque_core.api.values import FileData
from vtorque_core.base import hypervisor
from vtorque_core.cli.vsub import disk_in_memory, visible_image
from vtorque_core.config.policy import decide, needs
from vtorque_core.config.request import Request
from vtorque_core.plan.placement.topology import parse
from vtorque_testing.faults import orphans

pytestmark = [pytest.mark.integration, pytest.mark.e2e]

SCHEMA = Path("/usr/share/libvirt/schemas/domain.rng")
URI = "test:///default"
KINDS = ("vcpu", "iothread", "emulator")
MACHINES = {path.stem: path for path in sorted(device_cases.CAPABILITIES.glob("*.xml"))}
SITES = {
    "vrdma": (CASES["vrdma"].settings["vrdma"], {}),
    "scam": ({"required": False}, {"required": False, "memory_bandwidth": 50}),
    "iocm": ({"interval": "60s", "required": False},),
    "pinning": ({"required": False}, {"required": False, "emulator_cpu": False}),
}
# Half of a machine with eight CPUs has room for one guest, with a vCPU and two I/O cores.
SMALL = {"vms_per_node": "1", "vcpus": "1", "iocm_max_cores": "2"}
ROWS = pairwise.rows({**VALUES, **{f"[{name}]": tables for name, tables in SITES.items()}})


@pytest.fixture(autouse=True)
def fresh_driver():
    """The test driver lives as long as its connection (https://libvirt.org/drvtest.html)."""
    hypervisor.close()
    yield
    hypervisor.close()


def some(rows):
    """Return a few of the rows, with each value of each factor."""
    left = list(rows)
    wanted = {(key, str(value)) for row in rows for key, value in row.items()}
    while wanted:
        row = max(left, key=lambda row: sum((k, str(v)) in wanted for k, v in row.items()))
        left.remove(row)
        wanted -= {(key, str(value)) for key, value in row.items()}
        yield row


def test_every_option_of_a_device_plugin_has_values():
    plugins = load()
    keys = {
        c.item.key
        for c in plugins.each(hooks.vtorque_options)
        if c.plugin in DEVICES and not c.error
    }
    assert keys <= set(VALUES), "add values of the key to VALUES in tests/support/device_cases.py"


def test_any_two_values_meet():
    for first in VALUES:
        for second in VALUES:
            met = {(row[first], row[second]) for row in ROWS}
            wanted = len(VALUES[first]) * (1 if first == second else len(VALUES[second]))
            assert len(met) == wanted, (first, second)


def request_of(row, cpus):
    """Return -vm keys and files of a row; ``cpus``: the job's."""
    pairs = {k: row[k] for k in VALUES if row[k] is not None}
    pairs = {k: v for k, v in pairs.items() if NEEDED.get(k) in (None, *pairs)}
    files = {}
    if pairs.get("vcpu_pinning") == "FILE":
        del pairs["vcpu_pinning"]
        size = int(pairs["vcpus"])
        half = len(cpus) // 2  # the guests are placed on the two NUMA nodes in turn
        lines = [
            ",".join(str(cpus[guest % 2 * half + guest // 2 * size + n]) for n in range(size))
            for guest in range(int(pairs["vms_per_node"]))
        ]
        files["vcpu_pinning"] = FileData("map", "\n".join(lines).encode())
    return pairs, files


def vsub_request(node, job):
    """Return vsub's request to the batch system: it has to suffice on any node."""
    wanted = decide(Request.decode(job.blob), node.site, node.plugins)
    found = needs(
        wanted,
        node.site,
        node.plugins,
        disk_in_memory(wanted, visible_image(wanted, node.site, node.plugins)),
    )
    return {"cpu_count": found.cpus, "mem_mib": found.mib}


def accepted(domains, top):
    """Have libvirt validate domains, as files below ``top`` and as guests of its test driver."""
    files = []
    for number, xml in enumerate(domains):
        files.append(top / f"{number}.xml")
        files[-1].write_text(xml)
    done = subprocess.run(
        ["xmllint", "--noout", "--relaxng", SCHEMA, *files],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for xml in domains:
        assert xml.startswith('<domain type="qemu"')
        hypervisor.create_domain(URI, xml.replace('type="qemu"', 'type="test"', 1))


FULL = pytest.mark.full
# A third of the values, on one machine; the others, and each two values on all, with --full.
SOME = list(some(ROWS))
PARTS = [
    *(
        pytest.param(m, SOME[n :: len(MACHINES)], id=f"{m}-some", marks=[FULL] * bool(n))
        for n, m in enumerate(MACHINES)
    ),
    *(
        pytest.param(machine, ROWS[part::3], id=f"{machine}-{part}", marks=FULL)
        for machine in MACHINES
        for part in range(3)
    ),
]


@pytest.mark.parametrize(("machine", "rows"), PARTS)
def test_domain_allowed_by_policy_is_accepted_by_libvirt(machine, rows, tmp_path):
    text = MACHINES[machine].read_text()
    known = parse(text)
    # Half of two NUMA nodes, SMT siblings and all.
    cpus = tuple(c for node in known.nodes[:2] for core in _cores(known, node) for c in core)
    with orphans() as left:
        for number, row in enumerate({**row, **(SMALL if len(cpus) < 8 else {})} for row in rows):
            top = tmp_path / str(number)
            settings = {**device_cases.together().settings, **{k: row[f"[{k}]"] for k in SITES}}
            node = device_cases.node(
                top, load(), device_cases.Case({}, settings), machine=text, share={}
            )
            pairs, files = request_of(row, cpus)
            job = node.job(pairs, files=files)
            share = {"cpus": cpus} if files else vsub_request(node, job)
            run = node.start(dataclasses.replace(job, **share))
            assert not run.error, (run, pairs)
            domains = node.domains()
            assert len(domains) == int(row["vms_per_node"])
            accepted(domains, top)
            hypervisor.close()
            spare = settings["pinning"].get("emulator_cpu", True)
            check_pins(
                domains, {**pairs, **files}, share.get("cpus"), share.get("cpu_count"), spare
            )
            node.release()
            assert left() == []


def check_pins(domains, row, cpus, count, spare):
    """A guest's own threads run on its own CPUs, all of them on the job's."""
    alone = {"vcpu": "scam" in row or "vcpu_pinning" in row, "iothread": "iocm" in row}
    own, used = [], []  # of each guest
    for xml in domains:
        tune = ElementTree.fromstring(xml).find("cputune")  # noqa: S314 - our own
        pins = {k: [parse_cpus(e.get("cpuset")) for e in tune.iter(f"{k}pin")] for k in KINDS}
        assert len(pins["vcpu"]) == int(row["vcpus"])
        if alone["vcpu"]:
            assert all(len(each) == 1 for each in pins["vcpu"]), pins
        if alone["iothread"]:
            assert len(set(pins["iothread"])) == 1, pins
        sets = {kind: {cpu for each in pins[kind] for cpu in each} for kind in KINDS}
        mine = [cpu for kind in KINDS if alone.get(kind) for cpu in sets[kind]]
        assert len(set(mine)) == len(mine), "vCPUs and I/O threads of a guest share a CPU"
        own.append(set(mine))
        used.append({cpu for kind in KINDS for cpu in sets[kind]})
        if "vcpu_pinning" in row and spare:
            assert not sets["emulator"] & sets["vcpu"], (
                "QEMU's other threads run on a CPU of a vCPU"
            )
    for number, mine in enumerate(own):
        assert not mine & set().union(*used[:number], *used[number + 1 :])
    together = set().union(*used)
    assert cpus is None or together <= set(cpus)
    assert count is None or len(together) <= count


def _cores(known, node):
    cores = [core for core in known.cores if set(core) <= set(node.cpus)]
    return cores[: len(cores) // 2]


def alone(name, case, top):
    """Return the steps of a start with this plugin only, and libvirt's input."""
    with orphans() as left:
        node = device_cases.node(top, load([name] if name else []), case)
        run = node.start(node.job({"vms_per_node": "2", **case.pairs}))
        assert not run.error, run
        domains = node.domains()
        accepted(domains, node.top)
        node.release()
        assert left() == []
        return run.steps, [xml.replace(str(node.top), "") for xml in domains]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the same of a start without any plugin."""
    return alone("", device_cases.Case({}), tmp_path_factory.mktemp("plain") / "node")


# The first one, and its variant, here; all with --full.
ALONE = [(name, CASES[name]) for name in DEVICES] + list(MORE.items())


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(pytest.param(*each, marks=pytest.mark.full) for each in ALONE[1:]),
        ALONE[0],
    ],
)
def test_plugin_works_without_other_plugins(name, case, plain, tmp_path):
    """The plugin alone must still change libvirt's input, the guest or the node."""
    assert alone(name, case, tmp_path / "node") != plain
