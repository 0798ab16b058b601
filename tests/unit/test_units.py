"""Sizes, durations, counts and booleans as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core import units


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("512M", 512),
        ("512", 512),
        ("2G", 2048),
        ("2g", 2048),
        ("1GiB", 1024),
        ("1gb", 1024),
        ("2048K", 2),
        ("1T", 1024**2),
        (" 3 G ", 3072),
    ],
)
def test_size(text, mib):
    assert units.size_mib(text) == mib


@pytest.mark.parametrize(
    "text",
    ["", "0", "0G", "1.5G", "-1G", "1P", "1000K", "G", "1 G B", "٣G", "9" * 16, "9" * 15 + "T"],
)
def test_not_a_size(text):
    with pytest.raises(ValueError, match="is not a"):
        units.size_mib(text)


@given(st.integers(1, 1 << 40))
def test_shown_size_reads_back(mib):
    assert units.size_mib(units.show_mib(mib)) == mib


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300", 300),
        ("90s", 90),
        ("5m", 300),
        ("5min", 300),
        ("2h", 7200),
        ("500ms", 0.5),
        ("1D", 86400),
    ],
)
def test_duration(text, seconds):
    assert units.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "1.5s", "-3s", "5w", "1h30m", "nan"])
def test_not_a_duration(text):
    with pytest.raises(ValueError, match="is not a duration"):
        units.duration(text)


@pytest.mark.parametrize("word", ["enabled", "TRUE", "Yes", " on "])
def test_true(word):
    assert units.boolean(word) is True


@pytest.mark.parametrize("word", ["disabled", "False", "no", "OFF"])
def test_false(word):
    assert units.boolean(word) is False


@pytest.mark.parametrize("word", ["0", "1"])
def test_digits_are_refused_with_the_reason(word):
    with pytest.raises(ValueError, match=r"ambiguous .*old vTorque took 0 for enabled"):
        units.boolean(word)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("1:00", 60), ("01:00:00", 3600), ("1:00:00:00", 86400)],
)
def test_walltime(text, seconds):
    assert units.walltime(text) == seconds


@pytest.mark.parametrize("text", ["", ":", "1:", "1:2:3:4:5", "1.5", "-1", "1h"])
def test_not_a_walltime(text):
    with pytest.raises(ValueError, match="walltime"):
        units.walltime(text)


@given(st.text())
@pytest.mark.parametrize(
    "parse", [units.size_mib, units.count, units.boolean, units.duration, units.walltime]
)
def test_any_text_gives_a_value_or_a_value_error(parse, text):
    try:
        value = parse(text)
    except ValueError as error:
        assert str(error)
    else:
        assert value >= 0
