"""Sizes, durations, counts and booleans as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.base import sizes

READ = {
    sizes.size_mib: {
        "512M": 512, "512": 512, "2G": 2048, "2g": 2048, "1GiB": 1024, "1gb": 1024, "2048K": 2,
        "1T": 1024**2, " 3 G ": 3072,
    },
    sizes.duration: {
        "300": 300, "90s": 90, "5m": 300, "5min": 300, "2h": 7200, "500ms": 0.5, "1D": 86400,
    },
    sizes.boolean: {
        **dict.fromkeys(("enabled", "TRUE", "Yes", " on "), True),
        **dict.fromkeys(("disabled", "False", "no", "OFF"), False),
    },
    sizes.walltime: {"30": 30, "1:00": 60, "01:00:00": 3600, "1:00:00:00": 86400},
}  # fmt: skip
REFUSED = {
    sizes.size_mib: (
        "is not a",
        ("", "0", "0G", "1.5G", "-1G", "1P", "1000K", "G", "1 G B", "٣G", "9" * 16, "9" * 15 + "T"),
    ),
    sizes.duration: ("is not a duration", ("", "s", "1.5s", "-3s", "5w", "1h30m", "nan")),
    sizes.boolean: (r"ambiguous .*old vTorque took 0 for enabled", ("0", "1")),
    sizes.walltime: ("walltime", ("", ":", "1:", "1:2:3:4:5", "1.5", "-1", "1h")),
}


@pytest.mark.parametrize("parse", READ)
def test_accepted_texts_are_parsed(parse):
    for text, value in READ[parse].items():
        found = parse(text)
        assert (found, type(found) is bool) == (value, type(value) is bool), text


@pytest.mark.parametrize("parse", REFUSED)
def test_rejected_texts_name_the_reason(parse):
    why, texts = REFUSED[parse]
    for text in texts:
        with pytest.raises(ValueError, match=why):
            raise AssertionError((text, parse(text)))


@given(st.integers(1, 1 << 40))
def test_shown_size_reads_back(mib):
    assert sizes.size_mib(sizes.show_mib(mib)) == mib


@given(st.text())
@pytest.mark.parametrize(
    "parse", [sizes.size_mib, sizes.count, sizes.boolean, sizes.duration, sizes.walltime]
)
def test_any_text_is_parsed_or_raises_value_error(parse, text):
    try:
        value = parse(text)
    except ValueError as error:
        assert str(error)
    else:
        assert value >= 0
