"""Release of journals of an older core: jobs survive an upgrade."""

from pathlib import Path

import pytest

from acme_card import AcmePlugin, loaded
from vtorque_core.api import hooks, kept_records
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.node.end.teardown import release_job
from vtorque_core.plan.placement.ledger import leased_resources
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import boot_id, find, journals, read, reconstruct
from vtorque_core.resources.kinds import CORE_KINDS, core_kind
from vtorque_testing.recorded import load

DATA = Path(__file__).parents[2] / "data" / "journals"
FILES = ("root.qcow2", "copy.qcow2", "seed.iso", "acme.log", "console.log")


@pytest.fixture
def paths(tmp_path):
    return Paths(tmp_path / "state", tmp_path / "run")


def plant(paths, name, key, boot=None):
    """Put a recorded journal in its job's place, with the files and directories that it names."""
    text = (DATA / f"{name}.jsonl").read_text()
    text = text.replace("@TOP@", str(paths.state.parent)).replace("@BOOT@", boot or boot_id())
    paths.journal.mkdir(parents=True, mode=0o700, exist_ok=True)
    path = paths.journal / f"{key}.jsonl"
    path.write_text(text)
    for directory in (paths.job_state(key) / "g0", paths.job_run(key) / "g0"):
        directory.mkdir(parents=True)
        for file in FILES:
            (directory / file).write_text("of the job")
    proof = paths.run / "proof" / f"{key}.json"
    proof.parent.mkdir(exist_ok=True)
    proof.write_text("{}")
    (paths.state.parent / "manager").write_text("running")
    return path


GONE = {"setting"}
"""Kinds that neither the core nor any plugin acquires today."""
CASES = (("running", "25.vm.0"), ("half_released", "26.vm.1"), ("torn", "27.vm.0"))


@pytest.mark.parametrize(("name", "key"), CASES)
@pytest.mark.parametrize("boot", [None, "the previous boot"])
def test_all_resources_of_an_old_journal_are_released(paths, name, key, boot):
    plant(paths, name, key, boot)
    job = key.rpartition(".")[0]
    (report,) = release_job(paths, job, plugins_for=lambda _: loaded())
    assert report.clean and report.lines() == []
    assert len(report.released) == (19 if name == "half_released" else 20)
    assert journals(paths) == []
    for gone in (paths.job_state(key), paths.job_run(key), paths.run / "proof" / f"{key}.json"):
        assert not gone.exists()
    assert "run" in [phase["name"] for phase in kept_records.find(paths, job)[-1].facts()["phases"]]


def test_old_journal_is_read_with_owner_and_resources(paths, tmp_path):
    plant(paths, "half_released", "26.vm.1")
    (state,) = find(paths, "26.vm")
    header = state.header
    assert header.job == JobAttempt("26.vm", 1, "ada", 1000)
    assert (state.key, header.batch, header.whole_node) == (header.job.key, "local", True)
    assert header.plugins == {"acme": "vtorque-acme 1.0.0"}
    assert state.guests == ("vt-26.vm.1-n1-0",)
    assert [(r.kind, r.tries) for r in state.open if r.tries] == [("process", 1)]
    taken = leased_resources([state])
    assert taken.items["address"] == {"10.0.0.2"} and set(taken.shares) == {0, 1, 2, 3}
    log = tmp_path / "acme.log"
    release_job(paths, "26.vm", plugins_for=lambda _: loaded(AcmePlugin(log=log)))
    assert not log.exists()  # its last check was before


def test_plugins_get_the_job_of_an_old_journal(paths, tmp_path):
    plant(paths, "running", "25.vm.0")
    log = tmp_path / "acme.log"
    release_job(paths, "25.vm", plugins_for=lambda _: loaded(AcmePlugin(log=log)))
    assert log.read_text() == '["25.vm", 0, "ada", ["vt-25.vm.0-n1-0"]]\n'


def test_old_journal_is_appended_to(paths):
    path = plant(paths, "torn", "27.vm.0")
    with Journal.open(paths, path) as journal:
        journal.phase("teardown")
    assert read(path).phases[-1].name == "teardown"


SOURCES = (
    ("restored", "31.vm.0"),
    ("migrated", "32.vm.1"),
    pytest.param("with_warm_guest", "1.0", marks=pytest.mark.root),
)
"""Jobs whose guests did not boot, as journaled by the core before boot sources existed."""


@pytest.mark.parametrize(("name", "key"), SOURCES)
@pytest.mark.parametrize("boot", [None, "the previous boot"])
def test_job_with_guests_of_an_old_boot_source_is_released(paths, name, key, boot):
    plant(paths, name, key, boot)
    if name == "with_warm_guest":
        plant(paths, "warm_guest", "spare-4db49dd3.0", boot)
    if name == "migrated":
        (paths.state.parent / "vtorque.toml").write_text('[batch]\nsystem = "local"\n')
    (report,) = release_job(paths, key.rpartition(".")[0], plugins_for=lambda _: load())
    assert report.clean and report.lines() == []
    assert "domain" in {outcome.kind for outcome in report.released}
    assert journals(paths) == []
    assert not list(paths.state.rglob("g0"))


def test_kinds_that_moved_to_a_plugin_are_released_by_the_plugin(paths):
    plant(paths, "other_kinds", "28.vm.0")
    mine = load({"passthrough", "unclot"})
    (report,) = release_job(paths, "28.vm", plugins_for=lambda _: mine)
    assert {"shm", "vfio"} <= {outcome.kind for outcome in report.released}
    assert {outcome.kind for outcome in report.orphaned} == GONE


def test_kinds_of_old_journals_are_known_with_their_fields():
    """The core or the plugin that provides the kind today must know all fields."""
    kinds = {each.item.kind: each.item for each in load().each(hooks.vtorque_resources)}
    kinds |= {kind: core_kind(kind) for kind in CORE_KINDS}
    seen = {"core": set(), "survive": set(), "linux-guest": set()}
    for file in DATA.glob("*.jsonl"):
        for record in read(file).records.values():
            if record.plugin in seen and record.kind not in GONE:
                reconstruct(record, kinds.get(record.kind))
                seen[record.plugin].add(record.kind)
    moved, newer = {"shm", "vfio"}, {"disk-file", "process"}
    assert seen["core"] == set(CORE_KINDS) - newer | moved
    assert seen["linux-guest"] == {"linux-seed"}
    assert seen["survive"] == {
        *("survive-disk", "survive-fifo", "survive-held", "survive-link", "survive-placeholder"),
        "file",
    }
