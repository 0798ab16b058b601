"""Output and exit code from real consoles, recorded from OSv v0.57.0-398 under QEMU 7.2."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vtorque_osv.console import BEGIN, OsvConsole

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.stem for path in DATA.glob("*.console"))


def read(data, sizes=(1 << 20,), **kwargs):
    """Feed a console in parts of these sizes repeatedly; return output and outcome."""
    console = OsvConsole({"/hello"}, **kwargs)
    out, at, turn = b"", 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        out += console.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    rest, outcome = console.end()
    return out + rest, outcome


@pytest.mark.parametrize(
    ("name", "out", "code"),
    [
        ("ret0", b"hello\n", 0),
        ("ret42", b"will return 42\n", 42),
        ("exit7", b"will exit 7\n", 7),
        ("exit0", b"will exit 0\n", 0),
        ("noeol3", b"", 3),  # OSv loses text without a newline: nothing is flushed
        ("several", b"will return 3\nwill return 0\nwill exit 9\n", 3),
        ("background", b"line 0 of many\nline 1 of many\nline 2 of many\nwill return 2\n", 2),
    ],
)
def test_output_and_exit_code_are_parsed(name, out, code):
    said, outcome = read((DATA / f"{name}.console").read_bytes())
    assert (said, outcome.code, outcome.reason) == (out, code, "")


@pytest.mark.parametrize(
    ("name", "out", "code", "words"),
    [
        ("abort", b"will abort\n", 134, "(abort)"),
        ("segv", b"will crash\n", 139, "(an invalid memory access)"),
    ],
)
def test_crash_is_a_failure(name, out, code, words):
    said, outcome = read((DATA / f"{name}.console").read_bytes())
    assert (said, outcome.code) == (out, code)
    assert words in outcome.reason
    assert any(line.startswith("0x") for line in outcome.detail)


def test_missing_program_is_exit_code_127():
    said, outcome = read((DATA / "missing.console").read_bytes())
    assert (said, outcome.code) == (b"", 127)
    assert outcome.reason == "Failed to load object: /no/such. Powering off."


def test_unreadable_script_disk_is_a_failure():
    said, outcome = read((DATA / "badscript.console").read_bytes())
    assert (said, outcome.booted) == (b"", False)
    assert outcome.code != 0


def test_osv_that_ends_before_the_job_is_a_failure():
    said, outcome = read((DATA / "badoption.console").read_bytes())
    assert (said, outcome.code, outcome.booted) == (b"", 126, False)
    assert outcome.reason == "unrecognized option: nonsense"


@pytest.mark.parametrize("name", NAMES)
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_chunk_boundaries_make_no_difference(name, sizes):
    data = (DATA / f"{name}.console").read_bytes()
    assert read(data, sizes) == read(data)


@pytest.mark.parametrize("stride", [29, pytest.param(7, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", NAMES)
def test_truncated_console_is_never_a_success(name, stride):
    data = (DATA / f"{name}.console").read_bytes()
    end = data.rindex(b"Powering off.") if b"Powering off." in data else len(data)
    for cut in {*range(0, end, stride + end // 200), *range(max(0, end - 300), end, stride)}:
        assert read(data[:cut])[1].code != 0


BOOT = b"OSv v1\r\nCmdline: /x\r\nSetting in environment: VTORQUE_OUTPUT=begins\r\n"
DOWN = b"VFS: unmounting /dev\r\nVFS: unmounting /\r\nROFS: hit ratio is 1%\r\nPowering off.\r\n"


@pytest.mark.parametrize(
    ("text", "out", "code"),
    [
        (b"50%", b"50%", 0),
        (b"a\r\r\nb\r\n", b"a\r\nb\n", 0),  # OSv adds one CR; the program's own are kept
        (b"VFS: unmounting /x\r\nmore\r\n", b"VFS: unmounting /x\nmore\n", 0),
        (b"program /other returned 3\r\n", b"program /other returned 3\n", 0),
        (b"abcprogram /hello returned 3\r\n", b"abc", 3),
        (b"program /hello returned 256\r\n", b"", 0),  # the status of wait(2)
        (b"program /hello returned -1\r\n", b"", 255),
        (b"Aborted\r\nnot really\r\n", b"Aborted\nnot really\n", 0),
        (b"\0\xff\r\n", b"\0\xff\n", 0),
        (b"[virtiofs] inode 2, opened\r\n[virtiofs]\r\n", b"[virtiofs]\n", 0),
        (b"a\r\nrandom: device unblocked.\r\nb\r\n", b"a\nb\n", 0),
    ],
)
def test_program_output_that_looks_like_osv_lines_is_kept(text, out, code):
    said, outcome = read(BOOT + text + DOWN)
    assert (said.removesuffix(b"\n"), outcome.code) == (out.removesuffix(b"\n"), code)


def test_output_is_returned_before_its_line_ends():
    console = OsvConsole({"/hello"})
    assert console.feed(BOOT + b"working... ") == b"working... "
    assert console.feed(b"done\r\n") == b"done\n"


def test_possible_osv_line_is_held_until_complete():
    console = OsvConsole({"/hello"})
    assert console.feed(BOOT + b"progr") == b""
    assert console.feed(b"ess: 3") == b"progress: 3"


def test_long_line_is_not_held_back():
    console = OsvConsole({"/hello"})
    assert len(console.feed(BOOT + b"program " + b"x" * 100_000)) > 90_000


def test_power_off_without_a_shutdown_is_a_failure():
    said, outcome = read(BOOT + b"half of it\r\n")
    assert (said, outcome.code) == (b"half of it\n", 134)
    assert "half of it" in outcome.detail


def test_lines_of_the_rest_server_are_not_output():
    server = b"httpserver: loaded plugin\r\nRest API server running on port 8000\r\n"
    said, outcome = read(BOOT + server + b"hi\r\n" + DOWN, begin="Rest API server running on port ")
    assert (said, outcome.code) == (b"hi\n", 0)


@given(st.binary(max_size=2000))
def test_any_console_bytes_are_parsed(data):
    _, outcome = read(data, (13, 1))
    assert outcome.code != 0 or b"Powering off." in data
    read(BOOT + data)


BOOTED = f"{BEGIN}\n".encode()


@pytest.mark.parametrize(
    ("first", "flood"),
    [
        (b"", b"x" * 65536),  # no newline ever, before it has booted
        (BOOTED, b"VFS: unmounting /x\n" * 1000),
        (BOOTED, b"Aborted\n" * 1000),
        (BOOTED + b"[backtrace]\n", b"0x1 <f>\n" * 1000),
        (BOOTED + b"[backtrace]\n", b"x" * 65536),
    ],
    ids=["no newline", "shutdown", "abort", "crash", "crash without newline"],
)
def test_endless_output_uses_bounded_memory(first, flood):
    """The console's output comes from the guest; the job wrapper runs on the host."""
    console = OsvConsole({"/prog"})
    console.feed(first)
    tracemalloc.start()
    try:
        for _ in range(40):
            console.feed(flood)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
    assert console.end()[1].code != 0
