"""Slurm's lists of hosts and counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_slurm import hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],m2", ["n1", "n2", "n3", "n7", "m2"]),
        ("a[08-11]b", ["a08b", "a09b", "a10b", "a11b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_host_lists_are_expanded(text, hosts):
    assert list(hostlist.expand(text)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n[",
        "n[1-]",
        "n[2-1]",
        "n[1-999999999]",
        "n]1",
        "a,,b",
        "n[1-99999]m[1-99999]",
        "[0-99998,0-99998]",
    ],
)
def test_invalid_host_list_is_refused(text):  # they take no memory either: users write such lists
    with pytest.raises(ValueError, match=r"is not a|more than"):
        hostlist.expand(text)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_counts_are_read_back(numbers):
    assert list(hostlist.counts(hostlist.show_counts(numbers))) == numbers
