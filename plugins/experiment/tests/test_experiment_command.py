"""Commands on completed experiments: tables, comparison, CI, export."""

import csv
import io
import json
import re
import sys
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

import experiments
import kept_experiments
from vtorque_core.api import Refused
from vtorque_experiment import compare, run_session, versions
from vtorque_experiment.book import Book
from vtorque_experiment.command import experiment
from vtorque_experiment.place import find_existing, validate_place
from vtorque_experiment.results import read


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return kept_experiments.sweep(tmp_path_factory.mktemp("a"), 8, failed=(3,))


@pytest.fixture(scope="module")
def slower(tmp_path_factory):
    return kept_experiments.sweep(tmp_path_factory.mktemp("b"), 8, factor=1.5)


def call(*argv, code=0):
    done = CliRunner().invoke(experiment, [*map(str, argv)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def test_results_without_a_terminal_are_plain_lines(sweep):
    lines = call("results", sweep).splitlines()
    assert lines[0].split() == [
        "NUMBER",
        "COMBINATION",
        "RUNS",
        "MEDIAN",
        "SPREAD",
        "LEAST",
        "MOST",
    ]
    assert sum(line.startswith("rate, MB/s") for line in lines) == 6
    assert "\x1b" not in "".join(lines) and lines[-1] == "without the numbers of 1 failed point"
    assert len(call("results", sweep, "--number", "rate").splitlines()) == 9


def test_single_run_is_not_reported_as_too_few(tmp_path):
    place = experiments.made(tmp_path, 'script = "job.sh"\n')
    book = Book(place.database)
    book.record_end(1, {"wall": 1.0, "code": 3.0}, 1e9, "", "exit code 3")
    book.close()
    said = call("results", place.top)
    assert "1 point of 1 combination: 1 failed\n" in said and "too few" not in said


def test_json_has_all_figures(sweep):
    found = json.loads(call("results", sweep, "--json"))
    assert len(found) == 6 and sum(each["failed"] for each in found) == 1
    assert {"wall", "rate", "wait", "code"} == set(found[0]["numbers"])
    assert found[0]["numbers"]["rate"]["unit"] == "MB/s"


def test_path_of_the_page_is_printed_and_dash_prints_only_the_page(sweep, tmp_path):
    path = tmp_path / "p.html"
    done = CliRunner().invoke(experiment, ["results", str(sweep), "--html", str(path)])
    assert done.stdout == "" and f"the page is {path}: " in done.stderr
    done = CliRunner().invoke(experiment, ["results", str(sweep), "--html", "-"])
    assert done.stdout.startswith("<!DOCTYPE html>") and "the page is" not in done.stderr


def test_status_prints_failures(sweep):
    said = call("status", sweep)
    assert "47 done, 1 failed" in said and "exit code 1: <broken>" in said
    assert json.loads(call("status", sweep, "--json"))["points"]["failed"] == 1


def test_two_experiments_are_compared(sweep, slower):
    found = json.loads(call("compare", sweep, slower, "--number", "wall", "--json"))
    assert len(found) == 6
    for pair in found:
        assert pair["ratio"]["low"] <= 1.5 <= pair["ratio"]["high"] or pair["base"]["count"] < 8
        assert pair["warning"] == ""
    said = call("compare", sweep, slower)
    assert "worse" in said and "no difference seen" in said


def test_guests_are_compared_with_bare_metal_of_the_same_size(sweep):
    pairs = compare.compare_within(read(sweep), ["bare=true"], ["wall"])
    assert {pair.cell for pair in pairs} == {
        f"guest vcpus={v} SIZE={s}" for v in (1, 2) for s in (1, 2)
    }
    for pair in pairs:
        assert pair.ratio.value == pytest.approx(1.1 if "vcpus=1" in pair.cell else 0.55, rel=0.02)


def test_too_few_runs_are_reported(tmp_path):
    few = kept_experiments.sweep(tmp_path, 2)
    said = call("compare", few, "--baseline", "bare=true")
    assert "too few runs (2 and 2; at least 6 of each are needed)" in said
    assert not re.search(r"[0-9] to [0-9]", said)
    assert "4 of 4 comparisons" in call("compare", few, "--baseline=bare=true", "--number=wall")


def test_emulated_guests_are_reported(tmp_path):
    top = kept_experiments.sweep(tmp_path, 6, machine="Linux 6.1, vvm, QEMU TCG, emulated")
    assert "36 points ran in emulated guests: without KVM" in call("results", top)
    assert {each["emulated"] for each in json.loads(call("results", top, "--json"))} == {6}
    assert "emulated guests: without KVM" in call("results", top, "--html", "-")
    argv = ("compare", top, "--baseline=bare=true", "--number=wall")
    assert "4 of 4 comparisons with emulated guests" in call(*argv)
    assert all(pair["emulated"] for pair in json.loads(call(*argv, "--json")))
    assert "4 of 4 comparisons with emulated guests" in call(*argv, "--html", "-")


def test_guests_with_kvm_are_not_reported(sweep):
    assert "emulated" not in call("results", sweep)
    assert {each["emulated"] for each in json.loads(call("results", sweep, "--json"))} == {0}
    assert "emulated" not in call("compare", sweep, "--baseline", "bare=true")


def test_conditions_set_the_exit_status(sweep, slower, tmp_path):
    hit = "median(wall) > 1.1 * baseline"
    call("compare", sweep, slower, "--fail-if", hit, code=3)
    call("compare", slower, sweep, "--fail-if", hit)
    call("results", sweep, "--fail-if", "median(wall) > 15", code=3)
    call("results", sweep, "--fail-if", "median(wall) > 1000")
    call("results", sweep, "--fail-if", "median(speed) > 1", code=1)
    junit = tmp_path / "j.xml"
    call("compare", sweep, slower, "--fail-if", hit, "--junit", junit, code=3)
    suite = ElementTree.fromstring(junit.read_text())[0]  # noqa: S314 - our own
    assert suite.get("tests") == suite.get("failures") == "6"
    assert "median(wall) > 1.1 * baseline holds: wall is" in suite[0][0].get("message")


def test_junit_file_is_valid_with_any_label(tmp_path):
    text = 'script = "job.sh"\nmatrix.env.A = ["<&\\u0001\\"", "]]>"]\n'
    top = kept_experiments.make(tmp_path, text, lambda cell, repetition: {"wall": 1.0})
    done = call("results", top, "--junit", "-")
    suite = ElementTree.fromstring(done)[0]  # noqa: S314
    assert suite[1].get("name") == "A=]]>"


def test_all_points_are_exported(sweep):
    rows = list(csv.DictReader(io.StringIO(call("export", sweep))))
    assert len(rows) == 48 and rows[0].keys() >= {"state", "bare", "vm.vcpus", "env.SIZE", "rate"}
    assert {row["vm.vcpus"] for row in rows if row["bare"] == "true"} == {""}
    same = json.loads(call("export", sweep, "--format", "json"))
    assert len(same) == 48 and same[0]["bare"] in (True, False)


def test_spreadsheet_contains_no_formula(tmp_path):
    text = 'script = "job.sh"\nmatrix.env.A = ["=cmd()"]\n'
    top = kept_experiments.make(tmp_path, text, lambda cell, repetition: {})
    assert ",'=cmd()" in call("export", top)


def test_missing_pyarrow_is_named_for_parquet(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = CliRunner().invoke(experiment, ["export", str(sweep), "--format=parquet"])
    assert "--format parquet needs pyarrow, which is not" in str(done.exception)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["status", "{none}"], "is not a results directory of an experiment; vmgr"),
        (["compare", "{sweep}"], "name two experiments, or one experiment and --baseline"),
        (
            ["compare", "{sweep}", "--baseline", "bare=maybe"],
            "is not an axis and value of the experiment",
        ),
        (["compare", "{sweep}", "--baseline", "x=1"], "known: bare, env.SIZE, vm.vcpus"),
        (["compare", "{sweep}", "{sweep}", "--number", "x"], "both record: rate, wall, wait"),
        (["results", "{sweep}", "--number", "x"], "not recorded in this experiment; known"),
        (["results", "{sweep}", "--fail-if", "median(wall) > baseline"], "there is no baseline"),
    ],
)
def test_invalid_arguments_are_refused(sweep, tmp_path, argv, said):
    argv = [word.format(sweep=sweep, none=tmp_path) for word in argv]
    with pytest.raises(Exception, match=said):
        CliRunner().invoke(experiment, argv, catch_exceptions=False)


def test_results_are_never_overwritten(tmp_path):
    experiments.made(tmp_path, 'script = "job.sh"\n')
    with pytest.raises(
        Refused, match="already contains results; continue it with vmgr experiment resume"
    ):
        experiments.made(tmp_path, 'script = "job.sh"\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(Refused, match="is not empty"):
        experiments.create.create(tmp_path / "e.toml", validate_place(tmp_path / "other"), dict)


def test_directory_with_special_characters_is_refused(tmp_path):
    with pytest.raises(Refused, match="contains characters that are special in batch systems"):
        validate_place(tmp_path / "a b")


def test_failed_points_are_rerun_and_old_output_is_kept(tmp_path):
    top = kept_experiments.sweep(tmp_path, 1, failed=(2,))
    place = find_existing(top)
    place.point(2).mkdir(parents=True)
    (place.point(2) / "stdout").write_text("old")
    book = Book(place.database)
    run_session._forget(book, place)
    (row,) = book.rows("waiting")
    book.close()
    assert row.number == 2 and row.tries == 0
    assert place.point(2).with_name("000002.old1").joinpath("stdout").read_text() == "old"


def test_changed_versions_are_noted_once_at_the_end(tmp_path, monkeypatch):
    path = tmp_path / "versions.json"
    path.write_text('{"qemu": "7.2", "images": {}}')
    now = {"qemu": "7.2", "images": {"micro": {"disk": "abc"}}}
    monkeypatch.setattr(versions, "collect_versions", lambda config: now)
    for _ in range(2):
        versions.note_end(tmp_path, path)
        found = json.loads(path.read_text())
        assert found == {"qemu": "7.2", "images": {}, "at_end": {"images": now["images"]}}


def test_database_of_another_version_is_refused(tmp_path):
    place = experiments.made(tmp_path, 'script = "job.sh"\n')
    book = Book(place.database)
    book.note("schema", "9")
    book.close()
    with pytest.raises(
        Refused,
        match="has schema 9, but this vmgr reads 1: use the version of vTorque that wrote it",
    ):
        Book(place.database)
    place.database.write_bytes(b"x" * 5000)
    with pytest.raises(Refused, match="it is not a results"):
        Book(place.database)
