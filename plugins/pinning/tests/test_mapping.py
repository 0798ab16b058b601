"""The mapping file: syntax, and errors with line numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_pinning.mapping import numbers, read


def test_lines_are_guests_and_numbers_are_their_vcpus():
    text = b"# two guests\n\n 8, 2-3 # on the far socket\r\n\t9,1,0\n"
    assert read(text, 2, 3) == ((8, 2, 3), (9, 1, 0))


def test_comment_may_contain_any_bytes():
    assert read(b"\xff\x00 # \n0 # \xe2\x80\xa8\xff 1\n".replace(b"\xff\x00 ", b""), 1, 1) == (
        (0,),
    )


@pytest.mark.parametrize(
    ("text", "guests", "vcpus", "why"),
    [
        (b"", 1, 1, "has 0 lines, but a node has 1 guests"),
        (b"# 0\n", 1, 1, "has 0 lines"),
        (b"0\n", 2, 1, "has 1 lines, but a node has 2 guests"),
        (b"0\n\n1\n", 1, 1, "line 3 is for no guest: a node has 1 guests"),
        (b"#\n0,x\n", 1, 2, "line 2 is not a list of numbers"),
        (b"0,,1\n", 1, 2, "line 1 is not a list"),
        (b"-1\n", 1, 1, "line 1 is not a list"),
        (b"0x1\n", 1, 1, "line 1 is not a list"),
        ("\u0661\n".encode(), 1, 1, "line 1 is not a list"),
        (b"\xff\n", 1, 1, "line 1 is not a list"),
        (b"3-1\n", 1, 3, "line 1 contains 3-1, where the first number is larger"),
        (b"0-99999\n", 1, 4, "line 1 contains more than 4 numbers"),
        (b"0-3,8\n", 1, 4, "line 1 contains more than 4 numbers"),
        (b"999999\n", 1, 1, "line 1 is not a list"),
        (b"1,2\n", 1, 4, "line 1 has 2 CPUs for 4 vCPUs"),
        (b"1-3,2\n", 1, 4, "line 1 contains 2 twice"),
        (b"0,1\n2,1\n", 2, 2, "line 2 contains CPU 1, which line 1 also contains"),
    ],
)
def test_invalid_mapping_names_the_line(text, guests, vcpus, why):
    with pytest.raises(ValueError, match=why):
        read(text, guests, vcpus)


@given(st.binary(max_size=300) | st.text("0123456789,- #\n").map(str.encode))
def test_any_bytes_are_a_mapping_or_refused(content):
    try:
        found = read(content, 2, 3)
    except ValueError as error:
        assert str(error).isprintable()
    else:
        assert len(found) == 2
        assert len({cpu for cpus in found for cpu in cpus}) == 6


def test_numbers_of_a_node_list():
    assert numbers("2-3,6", 8) == (2, 3, 6)
    with pytest.raises(ValueError, match="is not a list"):
        numbers("", 8)
