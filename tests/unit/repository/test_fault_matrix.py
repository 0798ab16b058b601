"""doc/generated/fault-matrix.md: some faults here, all with ``scripts/test --full``."""

import dataclasses
from pathlib import Path

import pytest

import fault_benches
from fault_benches import BENCHES
from fault_matrix import Fault, read_steps, survey, table, try_all, try_one
from matrix_faults import FAULTS, every

pytestmark = pytest.mark.e2e

PAGE = (Path(__file__).parents[3] / "doc" / "generated/fault-matrix.md").read_text()

# The step of each fault, every fourth one in the quick run: those with the greatest damage.
HERE = {
    "killed": ("start", "before create domain"),
    "EIO": ("start", "before record vfio"),
    "disk full": ("end", "after release domain"),
    "libvirtd dies": ("end", "before release domain"),
    "QEMU dies": ("end", "before release domain"),
    "clock +1 d": ("end", "before release vfio"),
    "clock -1 d": ("start", "after record domain"),
    "2 epilogues": ("end", "before release domain"),
    "2 prologues": ("start", "after record domain"),
    "reaper": ("start", "after record domain"),
    "reboot": ("start", "after record domain"),
    "release hangs": ("end", "before release vfio"),
    "plugin gone": ("end", "before release linux-seed"),
    "plugin changed": ("end", "before release linux-seed"),
}


@pytest.mark.parametrize("name", ["one", pytest.param("two", marks=pytest.mark.full)])
def test_page_has_all_steps(name, tmp_path):
    """Otherwise a resource was added or removed: run scripts/fault-matrix."""
    with fault_benches.bench(name, tmp_path) as bench:
        steps = survey(bench)
    lines = fault_benches.table_of(PAGE, name)
    if name == "one":
        assert read_steps(lines) == read_steps(table(steps, [], []))
    assert lines[-1].startswith(f"| **all** | | {len(steps)} |")
    heads = lines[0].strip("| ").split(" | ")
    assert {fault for head in heads[3:] for fault in head.split(", ")} == {*FAULTS}
    assert not any("leak" in line for line in lines)


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.full)])
def test_each_fault_leaves_nothing_at_one_step(tmp_path, stride):
    with fault_benches.bench("one", tmp_path, ("passthrough",)) as bench:
        steps = survey(bench)
        for name, (side, step) in list(HERE.items())[::stride]:
            (point, *_) = (p for p in steps if (p.side, p.step) == (side, step))
            assert FAULTS[name].at(point), name
            assert try_one(bench, FAULTS[name], point) == ""
    assert set(HERE) == set(FAULTS)


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("bench", BENCHES)
def test_fault_leaves_nothing_at_any_step(bench, name):
    steps, results = fault_benches.strike((bench, name))
    assert not [result.leak for result in results if result.leak]
    assert len(results) == sum(map(FAULTS[name].at, steps)) > 0


def test_leak_is_reported_at_its_steps(tmp_path):
    """A fault without a following epilogue, at the first three steps."""
    forgotten = Fault("forgotten", every, lambda _bench, _point, strike: strike() and None)
    with fault_benches.bench("one", tmp_path, ()) as bench:
        bench.job = dataclasses.replace(bench.job, blob=bench.other.blob)
        bench.patience = 0.0
        steps, results = try_all(bench, [forgotten], lambda p: p.number < 4 and p.side == "start")
    leaks = [result for result in results if result.leak]
    assert [result.point.step for result in leaks] == [
        "before record file",
        "after record file",
        "before create file",
    ]
    assert "journal/1.0.jsonl" in leaks[0].leak
    assert "| begin | file | 4 | **3 of 3 leak** |" in table(steps, results, ["forgotten"])


def test_table_is_written_between_its_marks():
    begin, end = fault_benches.marks("x")
    page = f"a\n{begin}old\n{end}b\n"
    assert fault_benches.written(page, {"x": "new"}) == f"a\n{begin}new\n{end}b\n"
    assert fault_benches.table_of(page, "x") == ["old"]
    with pytest.raises(ValueError, match="no marks for y"):
        fault_benches.written(page, {"y": "new"})
