"""Metric lines of a job: accepted and rejected lines, and hostile guests."""

import math
import socket
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_telemetry.app import MAX_LINE, MAX_READ, AppMeter, parse


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"loss 0.25", ("loss", (), 0.25)),
        (b"n_total 7 b=x,a=2\r", ("n_total", (("a", "2"), ("b", "x")), 7.0)),
        (b"a\t-1e-3", ("a", (), -0.001)),
        (b"a 1 b=" + b"b" * 60, ("a", (("b", "b" * 60),), 1.0)),
    ],
)
def test_valid_lines_are_parsed(line, expected):
    assert parse(line) == ("vtorque_app_" + expected[0], *expected[1:])


@pytest.mark.parametrize(
    "line",
    [
        b"  loss 1", b"a", b"a b", b"a 1 2", b"1a 1", b"a 1 b=c d=e", b"a nan", b"a inf",
        b"a 1e999", b"a --1", b"a 0x10", b"a 1 job=other", b"a 1 user=root", b"a 1 guest=1",
        b"a 1 le=1", b"a 1 node=n2", b"a 1 x=1,x=2", b"a 1 a=1,b=1,c=1,d=1,e=1", b"a 1 A=1", b",",
        b'a 1 a="b"', b"a 1 a=\x1b[31m", b"a 1 a=\xc3\xa9", b"\xff 1", b"a" * 61 + b" 1",
        b"a 1 a=" + b"b" * 61, b"a " + b"1" * MAX_LINE, b"__name__ 1", b"a\0 1",
        b"a 1 time=1",
    ],
)  # fmt: skip
def test_invalid_lines_are_rejected(line):
    assert parse(line) is None


@given(st.binary(max_size=600))
def test_any_bytes_are_parsed_or_rejected(line):
    parsed = parse(line)
    if parsed is not None:
        name, own, value = parsed
        assert name.startswith("vtorque_app_")
        assert name.isidentifier() and name.isascii()
        assert math.isfinite(value)
        allowed = set(string.ascii_letters + string.digits + "_./:+-")
        assert all(set(v) <= allowed for _, v in own)


@pytest.fixture
def guest():
    """Return a meter, and the guest's end of its port."""
    meter = AppMeter()
    assert meter.read(200) == {}
    port, ours = socket.socketpair()
    ours.setblocking(False)
    meter.connect(ours)
    assert meter.read(200) == {}
    yield meter, port
    for each in (meter, port):
        each.close()


def test_last_value_of_a_metric_is_used(guest):
    meter, port = guest
    port.sendall(b"loss 3\nloss 2\n\nacc 0.5 fold=1\nhalf")
    fresh = {("vtorque_app_loss", ()): 2.0, ("vtorque_app_acc", (("fold", "1"),)): 0.5}
    assert meter.read(200) == fresh
    port.sendall(b" 7\n")
    assert meter.read(200) == {("vtorque_app_half", ()): 7.0}
    assert meter.values == {**fresh, ("vtorque_app_half", ()): 7.0}
    assert meter.rejected == 0


def test_series_above_the_limit_are_rejected_and_known_ones_kept(guest):
    meter, port = guest
    port.sendall(b"".join(b"a 1 n=%d\n" % n for n in range(300)))
    assert len(meter.read(200)) == 200
    assert meter.rejected == 100
    port.sendall(b"a 2 n=0\nb 1\n")
    assert meter.read(0) == {("vtorque_app_a", (("n", "0"),)): 2.0}
    assert meter.rejected == 101


def test_flood_is_read_in_pieces_and_lines_are_bounded(guest):
    meter, port = guest
    port.setblocking(False)
    sent = 0
    try:
        while sent < 10 << 20:
            sent += port.send(b"x" * 65536)
    except BlockingIOError:
        pass
    read = 0
    while read < sent:
        meter.read(200)
        read += MAX_READ
        assert len(meter._rest) <= MAX_LINE + 1
    port.setblocking(True)
    port.sendall(b"\nok 1\n")
    meter.read(200)
    assert meter.values == {("vtorque_app_ok", ()): 1.0}
    assert meter.rejected == 1


def test_data_of_a_replaced_connection_is_read(guest):
    meter, port = guest
    port.sendall(b"a 1\nb ")
    port.close()
    other, ours = socket.socketpair()
    ours.setblocking(False)
    other.sendall(b"2\n")
    meter.connect(ours)
    assert meter.read(200) == {("vtorque_app_a", ()): 1.0, ("vtorque_app_b", ()): 2.0}
    other.close()


def test_guest_without_a_port_has_no_metrics(guest):
    meter, port = guest
    port.sendall(b"a 1\n")
    port.close()
    assert meter.read(200) == {("vtorque_app_a", ()): 1.0}
    assert meter.read(200) == {}
