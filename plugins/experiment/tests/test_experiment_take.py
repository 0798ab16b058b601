"""Values read from output files of jobs, also from hostile or unusual files."""

import os

import pytest

from vtorque_experiment import definition, take
from vtorque_experiment.book import PointRow
from vtorque_experiment.definition import NumberSource
from vtorque_experiment.end_collector import Collector


def number(point, **what):
    return take.number(NumberSource("x", **what), point)


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ({"pattern": r"rate (\S+)"}, 3.5),
        ({"pattern": r"rate (\S+)", "which": "first"}, 1.5),
        ({"pattern": r"rate (\S+)", "which": "sum"}, 5.0),
        ({"pattern": r"^(\d+)$"}, 42.0),
        ({"json": "a.1.b", "file": "out.json"}, 7.0),
        ({"json": "list", "file": "out.json", "which": "max"}, 9.0),
        ({"json": "t"}, 0.25),
        ({"metric": "loss"}, 0.125),
        ({"report": "total.cpu"}, 12.0),
    ],
)
def test_values_are_found_in_output_files(tmp_path, what, value):
    (tmp_path / "stdout").write_text('rate 1.5\nrate nan\nrate 3.5\nrate x\n42\n{"t": 0.25}\n')
    (tmp_path / "out.json").write_text('{"a": [0, {"b": 7}], "list": [1, 9, "x", true, null]}')
    (tmp_path / "metrics").write_text("loss 0.5\nloss 0.125 fold=1\nlossy 9\nloss\nloss x\n")
    (tmp_path / "report.json").write_text('{"total": {"cpu": 12}}')
    assert number(tmp_path, **what) == value


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"pattern": "no (.*)"}, "the pattern 'no"),
        ({"pattern": "noth(ing)"}, r"a number in what the pattern .* finds: put its digits"),
        ({"pattern": "x", "file": "gone"}, "gone: No such file"),
        ({"json": "a", "file": "stdout"}, "is not valid JSON"),
        ({"metric": "loss"}, "metrics: No such file"),
        ({"report": "a"}, "report.json: No such file"),
        ({"pattern": "x", "file": "fifo"}, "fifo: is not a regular file"),
        ({"pattern": "x", "file": "."}, "is not a regular file"),
    ],
)
def test_missing_value_is_reported(tmp_path, what, said):
    (tmp_path / "stdout").write_bytes(b"\xff\xfe nothing")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(take.MissingNumber, match=said):
        number(tmp_path, **what)


@pytest.mark.parametrize(
    ("cpu", "files", "bare", "emulated"),
    [
        ("QEMU TCG CPU version 2.5+", {}, False, True),
        ("QEMU TCG CPU version 2.5+", {}, True, False),  # this machine may itself be a node
        ("A CPU", {}, False, False),
        ("A CPU", {"vsub.err": "vsub: warning: no KVM: guests are emulated, slower"}, False, True),
        ("A CPU", {"batch.err": "vtorque: warning: guests are emulated"}, False, True),
        ("A CPU", {"batch.err": "vtorque: warning: guests are emulated"}, True, False),
        ("A CPU", {"stderr": "guests are emulated"}, False, False),
    ],
)
def test_guest_without_kvm_is_detected(tmp_path, cpu, files, bare, emulated):
    (tmp_path / "ended").write_text("0 1.0 3.5\n")
    (tmp_path / "begun").write_text("1000 1.0\n")
    (tmp_path / "machine").write_text(f"Linux 6.1 x86_64\nvvm\n{cpu}\n")
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    found = definition.parse_definition({"script": "job.sh"}, "e.toml")
    row = PointRow(1, 0, 0, "submitted", "1.x", 1, 0, "", None, None, "")
    ended = Collector(found, lambda job, point: "").collect_end(row, tmp_path, bare)
    wanted = f"Linux 6.1 x86_64, vvm, {cpu}"
    assert ended.machine == (f"{wanted}, emulated" if emulated else wanted)
    assert ended.values["wall"] == 2.5


@pytest.mark.parametrize(("begun", "asked"), [(None, 1), (1e9, 0)])
def test_kept_report_is_not_fetched_again(tmp_path, begun, asked):
    found = definition.parse_definition({"script": "job.sh", "report": True}, "e.toml")
    (tmp_path / "begun").write_text("1000000000 5.0\n")
    (tmp_path / "ended").write_text("0 5.0 6.0\n")
    (tmp_path / "report.json").write_text("{}")
    row = PointRow(1, 0, 0, "failed", "1.srv", 1, 0, "no", 1e9, begun, "")
    jobs: list[str] = []
    Collector(found, lambda job, point: jobs.append(job) or "").collect_end(row, tmp_path, False)
    assert len(jobs) == asked


@pytest.mark.parametrize("name", ["ended", "begun", "stderr", "machine", "batch.err"])
def test_fifo_left_by_a_job_is_not_read(tmp_path, name):
    found = definition.parse_definition({"script": "job.sh"}, "e.toml")
    (tmp_path / "begun").write_text("1000 5.0\n")
    (tmp_path / "ended").write_text("3 5.0 6.0\n")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    row = PointRow(1, 0, 0, "submitted", "1.srv", 1, 0, "", None, None, "")
    ended = Collector(found, lambda job, point: "").collect_end(row, tmp_path, False)
    assert ("is not a regular file" in ended.reason) == (name in ("ended", "begun"))
