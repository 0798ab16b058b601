"""series.jsonl: format, maximum size, permissions."""

import json
import os
import subprocess
from itertools import pairwise

import pytest

from reachable import reachable
from vtorque_core.api import JobAttempt, Paths, kept_records
from vtorque_telemetry import series
from vtorque_telemetry.series import MAX_LINES, NAME, SeriesFile


@pytest.fixture
def place(tmp_path):
    return kept_records.place(
        Paths(tmp_path / "state", tmp_path), JobAttempt("42.srv", 0, "u", 4321)
    )


@pytest.fixture(autouse=True)
def state(tmp_path):
    (tmp_path / "state").mkdir()


def opened(place):
    """Return the file of a job, opened as root would."""
    os.close(place.append(NAME))
    return SeriesFile(os.open(place.directory / NAME, os.O_RDWR), "42.srv", "n1", 2.0)


def lines(place):
    return [json.loads(line) for line in place.read(NAME).splitlines()]


def test_series_file_has_its_documented_format(place):
    file = opened(place)
    file.add(0, 1000.12345, {"a": 1.5, 'b{device="vda"}': 2})
    file.add(None, 1001.0, {"p": 3})
    file.close()
    head, first, second = lines(place)
    assert head == {"schema": 1, "job": "42.srv", "node": "n1", "interval": 2.0}
    assert first == {"t": 1000.123, "g": 0, "v": {"a": 1.5, 'b{device="vda"}': 2}}
    assert second == {"t": 1001.0, "g": None, "v": {"p": 3}}


def test_series_file_is_continued_after_a_kill(place):
    file = opened(place)
    for n in range(MAX_LINES):
        file.add(0, 1000.0 + 2 * n, {"n": n})
    file.close()  # thinned once
    again = opened(place)
    assert again.interval == 4.0
    again.add(0, 9000.0, {"n": -1})
    again.close()
    assert lines(place)[-1]["v"] == {"n": -1}
    assert len(lines(place)) == MAX_LINES // 2 + 2


def test_series_file_is_bounded_for_any_run_time(place):
    file = opened(place)
    file.add(None, 999.0, {"phase": 1})
    samplings = 10_000
    for n in range(samplings):
        at = 1000.0 + 2 * n
        for guest in (0, 1):
            if file.is_due(guest, at):
                file.add(guest, at, {"counter": n, "guest": guest})
    file.close()
    head, *rest = lines(place)
    for guest in (0, 1):
        mine = [line for line in rest if line["g"] == guest]
        assert MAX_LINES / 2 - 1 <= len(mine) <= MAX_LINES
        assert mine[0]["t"] == 1000.0
        assert samplings - mine[-1]["v"]["counter"] <= 16
        for line in mine:
            assert line["v"] == {"counter": (line["t"] - 1000) / 2, "guest": guest}
        gaps = [b["t"] - a["t"] for a, b in pairwise(mine)]
        assert head["interval"] / 2 <= min(gaps) <= max(gaps) <= head["interval"] * 1.5
    assert head["interval"] == 16.0
    assert [line["v"] for line in rest if line["g"] is None] == [{"phase": 1}]


def test_value_reported_once_survives_thinning(place):
    file = opened(place)
    for n in range(MAX_LINES):
        app = {f'vtorque_app_once{{n="{n}"}}': n} if n in (7, 8) else {}
        file.add(0, 1000.0 + 2 * n, {"n": n, **app})
    file.close()
    said = {
        k: v for line in lines(place) if "v" in line for k, v in line["v"].items() if "app" in k
    }
    assert said == {'vtorque_app_once{n="7"}': 7, 'vtorque_app_once{n="8"}': 8}


def test_truncated_line_loses_no_other_line(place):
    """From a killed sampler or a full disk: it would fail at the first thinning."""
    opened(place).close()
    descriptor = place.append(NAME)
    os.write(descriptor, b'{"t":1,"g":0,"v":{"n":1}}\n{"t":2,"g":0,"v":{"n"')
    os.close(descriptor)
    file = opened(place)
    for n in range(2 * MAX_LINES):
        file.add(0, 1000.0 + 2 * n, {"n": n})
    file.close()
    assert lines(place)[-1]["v"] == {"n": 2 * MAX_LINES - 1}
    assert lines(place)[0]["interval"] > 2.0


def test_partly_written_line_is_an_error_and_is_overwritten(place, monkeypatch):
    file, write = opened(place), os.pwrite
    monkeypatch.setattr(series.os, "pwrite", lambda fd, data, at: write(fd, data[:9], at))
    with pytest.raises(OSError, match="No space left"):
        file.add(0, 1.0, {"a": 1})
    monkeypatch.undo()
    file.add(0, 2.0, {"a": 2})
    file.close()
    assert json.loads(place.read(NAME).splitlines()[-1]) == {"t": 2.0, "g": 0, "v": {"a": 2}}


def test_full_disk_during_thinning_is_recovered_later(place, monkeypatch):
    file = opened(place)
    for n in range(MAX_LINES - 1):
        file.add(0, 1000.0 + 2 * n, {"n": n})
    write = os.pwrite

    def full(descriptor, data, at):
        if at == 0:
            raise OSError(28, "full")
        return write(descriptor, data, at)

    monkeypatch.setattr(series.os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        file.add(0, 9000.0, {})
    monkeypatch.undo()
    file.add(0, 9002.0, {"n": -1})
    file.close()
    head, *rest = lines(place)
    assert (head["interval"], rest[-1]["v"]) == (4.0, {"n": -1})
    assert len(rest) <= MAX_LINES / 2 + 2


def test_long_metric_names_do_not_fill_the_disk(place, monkeypatch):
    monkeypatch.setattr(series, "MAX_BYTES", 1 << 20)
    own = {f"vtorque_app_{n}{{{'x' * 400}}}": float(n) for n in range(200)}  # its maximum
    file = opened(place)
    for n in range(100):
        file.add(0, 1000.0 + 2 * n, {"n": n, **own})
        assert (place.directory / NAME).stat().st_size <= 1 << 20
    file.close()
    head, *rest = lines(place)
    assert head["interval"] > 2.0
    assert rest[-1]["v"]["n"] == 99
    with pytest.raises(OSError, match="MiB"):
        opened(place).add(0, 1.0, {"x" * (1 << 20): 1})


def test_full_disk_raises_and_later_lines_are_written(place, monkeypatch):
    file = opened(place)
    monkeypatch.setattr(series.os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        file.add(0, 1.0, {})
    monkeypatch.undo()
    file.add(0, 2.0, {"a": 1})
    file.close()
    assert len(lines(place)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_only_the_owner_can_read_the_series(place, tmp_path):
    reachable(tmp_path / "state/kept")
    file = opened(place)
    for n in range(MAX_LINES + 1):  # also after it was replaced
        file.add(0, 1000.0 + 2 * n, {"n": n})
    file.close()
    path = str(place.directory / NAME)
    for uid, may in ((4321, True), (4322, False)):
        done = subprocess.run(
            ["cat", path], capture_output=True, check=False, user=uid, group=uid, extra_groups=[]
        )
        assert (done.returncode == 0) is may, (uid, done.stderr)
        assert not may or done.stdout.startswith(b'{"schema": 1')
