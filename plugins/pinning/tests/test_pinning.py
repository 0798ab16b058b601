"""From options to claims, and their placement by the ledger on recorded machines."""

import dataclasses

import pytest

from vtorque_core.api import HostFault, Refusal, Refused
from vtorque_core.api.claims import CoreClaim, Notice, RamClaim
from vtorque_core.api.host_topology import Topology, flat
from vtorque_core.api.values import FileData
from vtorque_pinning import node, plugin
from vtorque_testing import planned
from vtorque_testing.planned import Leases, NoFit

XEON, EPYC, ARM = map(planned.host, ("smt", "four-nodes", "arm"))
FLAT = flat((0, 1), 8192)

PLUGINS = planned.load_with_core("pinning", plugin, node)


def on(machine, config=""):
    return planned.PlannedNode.make(PLUGINS, config, machine)


def guests(machine, *pairs, mapping=None, config=""):
    """Return the guests of a job on this machine, as planned by the node."""
    files = {} if mapping is None else {"vcpu_pinning": FileData("map", mapping)}
    one = on(machine, config)
    return one.guests(one.request(*pairs, files=files))


def answers(guest, config=""):
    return on(guest.host, config).answers(guest)


def placed(machine, *pairs, mapping=None, config="", taken=None, **share):
    """Return the ledger's answer to the core's claims and the plugin's."""
    wanted = guests(machine, *pairs, mapping=mapping, config=config)
    share = {"exclusive": True, **share}
    return [g.placement for g in on(machine, config).place(*wanted, taken=taken, **share)]


PINNED = [
    CoreClaim("vcpu", 1, exclusive=True, key="vcpu_pinning"),
    CoreClaim("emulator", 1, key="vcpu_pinning"),
]


# -- Automatic -------------------------------------------------------------------------------------


def test_nothing_is_claimed_without_the_options():
    assert answers(*guests(XEON)) == []
    assert answers(*guests(XEON, "vcpu_pinning=no", "hugepages=off")) == []


def test_vcpus_get_dedicated_cpus_and_the_emulator_another():
    (got,) = placed(XEON, "vcpu_pinning=true", "vcpus=4")
    assert got.cores["vcpu"] == (0, 64, 1, 65)
    assert (got.own, got.nodes, got.threads) == ({"vcpu"}, (0,), 2)
    assert not set(got.cores["emulator"]) & set(got.cores["vcpu"])


def test_site_decides_on_a_cpu_for_the_emulator():
    pairs, without = ("vcpu_pinning=true", "vcpus=2"), "[plugin.pinning]\nemulator_cpu = false\n"
    (roomy,) = placed(XEON, *pairs, cpus=(0, 64, 3))
    assert (roomy.cores["vcpu"], roomy.cores["emulator"]) == ((0, 64), (3,))
    with pytest.raises(
        NoFit, match=r"vcpu_pinning=2: 2 exclusive and 1 shared CPUs \(3 in total\).*2 CPUs"
    ):
        placed(XEON, *pairs, cpus=(0, 64))
    (tight,) = placed(XEON, *pairs, cpus=(0, 64), config=without)
    assert tight.cores["emulator"] == (0, 64)
    (spare,) = placed(XEON, *pairs, cpus=(0, 64, 3), config=without)
    assert spare.cores["emulator"] == (3,)


def test_emulator_cpu_is_requested_from_the_batch_system():
    def asked(pair, config=""):
        return on(XEON, config).needs(pair, "vcpus=4").cpus

    assert asked("vcpu_pinning=false") == 4
    assert asked("vcpu_pinning=true") == 5
    assert asked("vcpu_pinning=true", "[plugin.pinning]\nemulator_cpu = false\n") == 4


@pytest.mark.parametrize(("machine", "count"), [(XEON, 2), (EPYC, 4), (ARM, 4)])
def test_guests_get_dedicated_cores_on_distinct_numa_nodes_first(machine, count):
    pairs = ("vcpu_pinning=true", "vcpus=8", "numa=strict")
    some = placed(machine, *pairs, f"vms_per_node={count}")
    assert sorted(p.nodes for p in some) == [(n.id,) for n in machine.nodes]
    assert all(dict(p.memory) == {p.nodes[0]: 1024} for p in some)
    more = placed(machine, *pairs, f"vms_per_node={count + 1}")
    cores = [cpu for p in more for cpu in p.cores["vcpu"]]
    assert len(cores) == len(set(cores)) == 8 * (count + 1)
    assert all(machine.nodes_of(p.cores["vcpu"]) == p.nodes for p in more)
    assert all(p.numa == "strict" for p in more)


def test_numa_policy_of_the_site_is_the_default():
    assert placed(EPYC, "vcpus=4")[0].numa == "preferred"
    assert placed(EPYC, "vcpus=4", "numa=strict")[0].numa == "strict"
    assert placed(EPYC, "vcpus=4", numa="strict")[0].numa == "strict"
    assert placed(EPYC, "vcpus=4", "numa=preferred", numa="strict")[0].numa == "preferred"
    assert placed(FLAT, "numa=strict")[0].numa is None  # one node: it applies implicitly
    with pytest.raises(
        NoFit, match=r"numa=strict: a guest of 65 CPUs .* must fit on one NUMA node"
    ):
        placed(XEON, "vcpus=65", "vcpu_pinning=true", "numa=strict")


# -- Huge pages ------------------------------------------------------------------------------------


def test_huge_pages_have_the_given_or_the_largest_size():
    for asked in ("true", "2M", "2048k"):
        (got,) = placed(XEON, f"hugepages={asked}", "ram=4G", "vcpu_pinning=true")
        assert (got.page_kib, dict(got.paged), dict(got.memory)) == (2048, {0: 4096}, {})
    both = dataclasses.replace(
        XEON,
        nodes=tuple(dataclasses.replace(n, pages={2048: 8192, 1048576: 4}) for n in XEON.nodes),
    )
    assert placed(both, "hugepages=on", "ram=4G")[0].page_kib == 1048576
    assert placed(both, "hugepages=on", "ram=4098M")[0].page_kib == 2048
    assert placed(both, "hugepages=on", "ram=16G")[0].page_kib == 2048
    assert placed(ARM, "hugepages=512M", "ram=1G")[0].page_kib == 524288


def test_largest_huge_page_size_with_enough_free_pages_is_used(tmp_path, monkeypatch):
    """The largest size, unless other jobs use so much of it that the job would have to wait."""
    monkeypatch.setattr(node, "SYSFS", tmp_path)
    both = dataclasses.replace(
        XEON,
        nodes=tuple(dataclasses.replace(n, pages={2048: 8192, 1048576: 4}) for n in XEON.nodes),
    )

    def chosen(small, large, *pairs):
        for kib, free in ((2048, small), (1048576, large)):
            (tmp_path / f"hugepages-{kib}kB").mkdir(exist_ok=True)
            (tmp_path / f"hugepages-{kib}kB/free_hugepages").write_text(f"{free}\n")
        return placed(both, "ram=4G", *pairs)[0].page_kib

    assert chosen(8192, 4, "hugepages=true") == 1048576
    assert chosen(8192, 3, "hugepages=true") == 2048
    assert chosen(8192, 4, "hugepages=true", "vms_per_node=2") == 2048
    assert chosen(2047, 3, "hugepages=true") == 1048576
    assert chosen(8192, 0, "hugepages=1G") == 1048576


@pytest.mark.parametrize(
    ("machine", "pairs", "has"),
    [
        (FLAT, ("hugepages=true",), "none"),
        (XEON, ("hugepages=1G",), "64G of 2M"),
        (XEON, ("hugepages=true", "ram=40G", "vms_per_node=2"), "64G of 2M"),
        (ARM, ("hugepages=true", "ram=768M"), "8G of 512M"),
    ],
)
def test_missing_huge_pages_are_refused(machine, pairs, has):
    wish = guests(machine, *pairs)[0]
    (said,) = answers(wish)
    assert isinstance(said, Refusal)
    assert f"{pairs[0]}: node n1 has no " in str(said)
    assert f"(it has {has})" in said.message
    assert said.where == "[plugin.pinning] required = true"
    (said,) = answers(wish, "[plugin.pinning]\nrequired = false\n")
    assert isinstance(said, Notice)
    assert f"(it has {has}); set vm.nr_hugepages" in said.text


def test_submit_host_claims_only_pinned_cpus():
    pairs = ("hugepages=1G", "vcpu_pinning=true")
    config = '[plugin.pinning]\nadvisor = "numad"\n'
    assert answers(*guests(Topology(), *pairs), config) == PINNED


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ("hugepages=3M", "is not a size of huge pages"),
        ("hugepages=big", "is not a size of huge pages"),
        ("hugepages=4K", "is not a size of huge pages"),
        ("hugepages=1", "is ambiguous"),
        ("vcpu_pinning=1", "is ambiguous"),
        ("numa=interleave", "write preferred or strict"),
        ("hugepages=2G", r"hugepages=2G: .* not a multiple .*\(limit: ram=1G\)"),
        ("vcpu_pinning=/etc/shadow", "the value must be the content of a file, not its name"),
    ],
)
def test_invalid_values_are_refused(pair, why):
    with pytest.raises(Refused, match=why):
        guests(XEON, pair)


# -- A user's file ---------------------------------------------------------------------------------


def test_mapping_is_read_as_the_user_and_keeps_its_order(tmp_path):
    (tmp_path / "my.map").write_bytes(b"33,97,40 # far\n5-7\n")
    made = on(XEON).submit("vcpu_pinning=my.map", cwd=tmp_path)
    assert made.files["vcpu_pinning"].content == b"33,97,40 # far\n5-7\n"
    one, two = placed(XEON, "vcpus=3", "vms_per_node=2", mapping=made.files["vcpu_pinning"].content)
    assert (one.cores["vcpu"], one.nodes) == ((33, 97, 40), (1,))
    assert (two.cores["vcpu"], two.nodes) == ((5, 6, 7), (0,))


def test_boolean_word_is_not_read_as_a_path(tmp_path):
    (tmp_path / "true").write_bytes(b"0\n")
    assert not on(XEON).submit("vcpu_pinning=True", cwd=tmp_path).files
    assert on(XEON).submit("vcpu_pinning=./true", cwd=tmp_path).files


def test_invalid_mapping_is_refused_with_file_and_line():
    with pytest.raises(Refused, match="vcpu_pinning=map: line 2 has 1 CPUs for 2 vCPUs; write one"):
        guests(XEON, "vcpus=2", mapping=b"# mine\n4\n")


@pytest.mark.parametrize(
    ("cpus", "share", "why"),
    [
        (b"500\n", {}, "vcpu_pinning=500: CPU 500 is not on this node"),
        (
            b"64\n",
            {"reserve_cores": 2},
            r"CPU 64 is reserved for the host \(limit: CPUs 1,"
            r".* set by \[node\] host_reserve_cores\)",
        ),
        (
            b"9\n",
            {"cpus": (1, 2)},
            r"CPU 9 is not granted to the job \(limit: CPUs 1,2, set by the job",
        ),
        (
            b"4\n",
            {"taken": Leases(items={"core": frozenset({"4"})}, shares={4: 1})},
            "CPU 4 is in use by another job",
        ),
        (b"4\n", {"taken": Leases(shares={4: 1})}, "CPU 4 is in use by another job"),
    ],
)
def test_mapping_to_cpus_outside_the_job_is_refused(cpus, share, why):
    with pytest.raises(NoFit, match=why):
        placed(XEON, mapping=cpus, **share)


def test_site_can_forbid_mapping_files():
    config = "[plugin.pinning]\nuser_files = false\n"
    assert guests(XEON, "vcpu_pinning=true", config=config)
    with pytest.raises(Refused, match=r"limit: true, false, set by \[plugin.pinning\] user_files"):
        guests(XEON, mapping=b"4\n", config=config)
    config = "[options.vcpu_pinning]\nallow = [true, false]\n"
    assert guests(XEON, "vcpu_pinning=yes", config=config)
    with pytest.raises(Refused, match=r"vcpu_pinning=map: is not allowed \(limit: true, false"):
        guests(XEON, mapping=b"4\n", config=config)


def test_site_can_pin_by_default():
    config = "[options.vcpu_pinning]\ndefault = true\n[options.hugepages]\nmax = '2M'\n"
    assert placed(XEON, config=config)[0].own == {"vcpu"}
    assert not placed(XEON, "vcpu_pinning=false", config=config)[0].own
    with pytest.raises(Refused, match=r"hugepages=1G: is more than allowed \(limit: 2M"):
        guests(XEON, "hugepages=1G", config=config)
    config = "[options.hugepages]\nallow = [true, false, '2M']\n"
    for granted in ("yes", "no", "2048K"):
        assert guests(XEON, f"hugepages={granted}", config=config)
    with pytest.raises(Refused, match=r"hugepages=1G: is not allowed \(limit: true, false, 2M"):
        guests(XEON, "hugepages=1G", config=config)


# -- numad -----------------------------------------------------------------------------------------

NUMAD = '[plugin.pinning]\nadvisor = "numad"\n'


@pytest.fixture
def numad(monkeypatch):
    """Replace numad(8), which needs a machine with several NUMA nodes; return its calls."""
    calls = []

    def run(*argv, timeout):
        calls.append(argv)
        if isinstance(run.says, HostFault):
            raise run.says
        return run.says

    monkeypatch.setattr(node, "run_tool", run)
    run.calls, run.says = calls, "2\n"
    return run


def test_numad_advice_is_followed_if_cpus_are_free(numad):
    pairs = ("vcpu_pinning=true", "vcpus=4", "ram=2G")
    assert placed(EPYC, *pairs)[0].nodes == (0,)
    assert placed(EPYC, *pairs, config=NUMAD)[0].nodes == (2,)
    assert numad.calls == [("numad", "-w", "4:2048")]
    full = Leases(items={"core": frozenset(map(str, EPYC.nodes[2].cpus))})
    assert placed(EPYC, *pairs, config=NUMAD, taken=full)[0].nodes == (0,)
    numad.says = "1,3\n"
    assert placed(EPYC, *pairs, config=NUMAD)[0].nodes == (1,)


def test_numad_is_called_once_per_job_and_only_if_useful(numad):
    pairs = ("vcpu_pinning=true", "vcpus=4", "vms_per_node=2")
    assert sorted(p.nodes for p in placed(EPYC, *pairs, config=NUMAD)) == [(0,), (2,)]
    assert len(numad.calls) == 1
    placed(FLAT, "vcpu_pinning=true", config=NUMAD)
    placed(EPYC, "vcpus=4", config=NUMAD)
    placed(EPYC, "vcpus=1", mapping=b"4\n", config=NUMAD)
    assert len(numad.calls) == 1


@pytest.mark.parametrize("says", ["", "all of them\n", "0-9\n", HostFault("numad: no end")])
def test_failing_numad_does_not_stop_the_job(numad, says):
    numad.says = says
    vcpu, notice, emulator = answers(*guests(EPYC, "vcpu_pinning=true"), NUMAD)
    assert [vcpu, emulator] == PINNED
    assert "numad failed" in notice.text


def test_user_is_notified_of_unfollowed_advice(numad):
    (guest,) = guests(EPYC, "vcpu_pinning=true")
    assert RamClaim(near=(2,), advisor="numad", key="vcpu_pinning") in answers(guest, NUMAD)
    here, there = (on(EPYC, config).place(guest)[0] for config in (NUMAD, ""))
    assert on(EPYC, NUMAD).placement_notices(here) == []
    (said,) = on(EPYC, NUMAD).placement_notices(there)
    assert said.text.startswith("numad advised NUMA node 2; guest 0 is on 0,")


def test_health_check_reports_missing_numad(monkeypatch):
    ((_, check),) = [dataclasses.astuple(c) for c in node.vtorque_health_checks()]
    assert [r.status for r in check(on(XEON).site)] == ["ok"]
    monkeypatch.setattr(node.shutil, "which", lambda *_, **__: None)
    assert [r.status for r in check(on(XEON).site)] == ["ok"]
    (said,) = check(on(XEON, NUMAD).site)
    assert (said.status, said.fix) == (
        "failed",
        'apt-get install numad, or set [plugin.pinning] advisor = "ledger"',
    )


def test_contradicting_config_is_reported():
    def of(text):
        return " ".join(planned.config_problems(PLUGINS, text))

    assert "excludes false, the default" in of("[options.vcpu_pinning]\ndeny = ['*']\n")
    assert "is not a boolean" in of("[options.vcpu_pinning]\nallow = ['*.map']\n")
    assert "is not a boolean" in of("[options.vcpu_pinning]\ndefault = '/etc/map'\n")
    assert "advisor" in of('[plugin.pinning]\nadvisor = "me"\n')
