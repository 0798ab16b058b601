"""The end of a guest's console: bounded, printable, and never a cause of failure."""

import os

from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.records.console import LINES, WIDTH, lines_of, tail


def test_last_nonempty_lines_are_returned():
    data = b"".join(b"line %d\r\n \r\n" % number for number in range(50))
    assert lines_of(data) == tuple(f"line {number}" for number in range(50 - LINES, 50))


def test_terminal_control_characters_are_escaped():
    data = b"\x1b[2J\x1b[1;31mpanic\x1b[0m\x1bc\x07 \x9b31m\xff\xe2\x80\xae\x1b]0;title\x07\n"
    (line,) = lines_of(data)
    assert line.startswith("panic\\x07")
    assert line.isprintable()


@given(st.binary(max_size=5000))
def test_any_bytes_become_few_short_printable_lines(data):
    lines = lines_of(data)
    assert len(lines) <= LINES
    assert all(line.isprintable() and 0 < len(line) <= WIDTH + 30 for line in lines)


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "console.log"
    log.write_bytes(b"x" * 3_000_000 + b"\nthe end")
    *_, last = tail(log)
    assert last == "the end"


def test_unreadable_console_is_empty(tmp_path):
    (tmp_path / "target").write_text("secret\n")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "fifo")
    for name in ("missing", "link", "fifo", "."):
        assert tail(tmp_path / name) == ()
