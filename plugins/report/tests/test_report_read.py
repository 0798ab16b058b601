"""Kept records of a job are read as untrusted text: bounded, checked, printable, never fatal."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kept_data
from vtorque_core.api import Refused
from vtorque_report import load, read

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
KEYS = ("job", "node", "nodes", "guests", "phases", "ended", "started", "status", "attempt")


def test_job_is_read_as_it_was_kept(tmp_path):
    found = read.attempt(kept_data.make(tmp_path, seconds=40.0, guests=2), 0.0)
    assert (found.job, found.owner, found.node, found.status) == ("42.srv", "ada", "n1", 0)
    assert [g.rank for g in found.guests] == [0, 1]
    assert (found.guests[0].vcpus, found.guests[0].ram_mib) == (4, 8192)
    assert (found.guests[1].cpu_seconds, found.guests[1].peak_mib) == (44.0, 640)
    assert len(found.guests[0].lines) == 22
    run = next(p for p in found.phases if p.name == "run")
    assert (run.guest, run.end - run.start) == (None, pytest.approx(40))
    ready = next(p for p in found.phases if p.name == "ready" and p.guest == 1)
    assert ready.end - ready.start == pytest.approx(2.2 * 0.82)


def test_last_phase_of_a_running_job_lasts_until_now(tmp_path):
    marks = [
        {"name": "boot", "guest": None, "start": 100.0, "seconds": 5.0},
        {"name": "run", "guest": None, "start": 105.0, "seconds": 0.001},
    ]
    kept_data.make(tmp_path, telemetry=False, phases=marks, ended=None, status="")
    found = read.attempt(tmp_path, 165.0)
    assert [(p.name, p.end - p.start) for p in found.phases] == [("boot", 5.0), ("run", 60.0)]
    assert found.ended is None and found.status is None


def test_phases_of_telemetry_are_used_without_others(tmp_path):
    kept_data.make(tmp_path, seconds=10.0, phases=None)
    found = read.attempt(tmp_path, 0.0)
    assert [p.name for p in found.phases] == [name for name, _ in kept_data.PHASES]
    assert found.phases[4].end - found.phases[4].start == pytest.approx(2.2)


def test_long_series_are_thinned_for_each_guest_and_end_with_the_last(tmp_path):
    kept_data.make(tmp_path, seconds=3000.0, guests=3)
    whole, few = (read.attempt(tmp_path, 0.0, most) for most in (10_000, 100))
    for one, other in zip(whole.guests, few.guests, strict=True):
        assert len(one.lines) == 1502
        assert 90 <= len(other.lines) <= 102
        assert other.lines[0] == one.lines[0] and other.lines[-1] == one.lines[-1]


def test_terminal_control_characters_are_escaped(tmp_path):
    bad = "\x1b]0;gotcha\x07\u202e\x9b31m"
    change = lambda values: values | {f"vtorque_app_{bad}": 1.0}  # noqa: E731
    kept_data.make(tmp_path, seconds=10.0, name=bad, node=bad, owner=bad, image=bad, change=change)
    found = read.attempt(tmp_path, 0.0)
    texts = [found.name, found.node, found.owner, found.image, *found.guests[0].lines[0].values]
    assert all(text.isprintable() for text in texts)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"guests": [[]], "phases": 3}'],
)
def test_broken_file_causes_no_traceback(tmp_path, text):
    kept_data.make(tmp_path, seconds=10.0)
    (tmp_path / "series.jsonl").write_bytes(b'{"schema":1}\n' + text + b'\n{"t":1,"g":0,"v":{}}')
    assert read.attempt(tmp_path, 0.0) is not None
    (tmp_path / "job.json").write_bytes(text)
    found = read.attempt(tmp_path, 0.0)
    assert found is None or found.guests == ()


@given(
    facts=st.dictionaries(st.sampled_from(KEYS), JSON),
    guest=st.dictionaries(st.sampled_from(("rank", "index", "vcpus", "ram_mib")), JSON),
    span=st.dictionaries(st.sampled_from(("name", "guest", "start", "seconds", "peak_mib")), JSON),
    line=st.dictionaries(st.sampled_from(("t", "g", "v")), JSON),
)
@settings(max_examples=settings().max_examples * 3 // 2, deadline=None)
def test_any_kept_data_gives_a_report(tmp_path_factory, facts, guest, span, line):
    directory = tmp_path_factory.mktemp("kept")
    known = {"job": "1", "guests": [guest, guest], "phases": [span, {**span, "name": "used"}]}
    (directory / "job.json").write_text(json.dumps(known | facts))
    (directory / "series.jsonl").write_text("{}\n" + '{"t":1,"g":0,"v":{}}\n' + json.dumps(line))
    report = load.report([directory], 10.0)
    json.dumps(report.data())


def test_link_or_pipe_is_not_read(tmp_path):
    real = kept_data.make(tmp_path / "real", seconds=10.0)
    for name in ("link", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "link/job.json").symlink_to(real / "job.json")
    os.mkfifo(tmp_path / "pipe/job.json")
    for name in ("link", "pipe", "nothing"):
        with pytest.raises(Refused, match=name):
            load.report([tmp_path / name], 0.0)


def test_nodes_of_a_job_have_one_report(tmp_path):
    nodes = ["n1", "n2", "n3"]
    one = kept_data.make(tmp_path / "a", seconds=10.0, nodes=nodes)
    other = kept_data.make(tmp_path / "b", seconds=10.0, nodes=nodes, node="n2")
    facts = json.loads((other / "job.json").read_text())
    facts["guests"][0]["rank"] = 1
    (other / "job.json").write_text(json.dumps(facts))
    alone, both = load.report([one], 0.0), load.report([other, one], 0.0)
    assert (
        "only 1 of 3 nodes: n2, n3 have their own records; add copies of them with --from"
        in alone.missing_data[0]
    )
    assert [(g.rank, g.node) for g, _ in both.guests] == [(0, "n1"), (1, "n2")]
    assert both.total.vcpus == 8 and "2 of 3 nodes" in both.missing_data[0]
    with pytest.raises(Refused, match="belongs to node n1, which is already in the report"):
        load.report([one, other, one], 0.0)
    foreign = kept_data.make(tmp_path / "c", seconds=10.0, job="43.srv")
    with pytest.raises(Refused, match=r"belongs to job 43.srv, attempt"):
        load.report([one, foreign], 0.0)


def test_page_is_written_atomically_and_not_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    page = tmp_path / "page.html"
    page.symlink_to(victim)
    load.write(page, b"page")
    assert victim.read_text() == "mine" and page.read_bytes() == b"page"
    assert not page.is_symlink() and page.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Refused, match="No such file"):
        load.write(Path(tmp_path, "none", "page.html"), b"page")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "victim"]
