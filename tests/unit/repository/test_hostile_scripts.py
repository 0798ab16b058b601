"""Job scripts and options that are expensive to parse: the embedded batch system parses as root.

Python's shlex takes four minutes for one line of 4 MiB, and no other user is served in this time.
"""

from __future__ import annotations

import shlex
import signal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counting import calls
from vtorque_core.base.errors import UsageError
from vtorque_local.qsub import describe, variables
from vtorque_pbs import convention as pbs

SIZE = 1 << 19  # an eighth of the longest script; shlex: a quarter of a minute
HEAD = b"#!/bin/sh\n#PBS "
SCRIPTS = {
    "long word": lambda size: HEAD + b"-v A=" + b"x" * size,
    "unterminated quote": lambda size: HEAD + b"-v A='" + b"x" * size,
    "unterminated double quote": lambda size: HEAD + b'-v A="' + b"\\x" * (size // 2),
    "escapes": lambda size: HEAD + b"-v A=" + b"\\x" * (size // 2),
    "quotes": lambda size: HEAD + b"-v A=" + b"''" * (size // 2),
    "words": lambda size: HEAD + b"-V " * (size // 24),
    "resources": lambda size: HEAD + b"-l " + b"a=1," * (size // 32),
    "one resource": lambda size: HEAD + b"-l nodes=1" + b",1" * (size // 2),
    "lines": lambda size: b"#!/bin/sh\n" + b"#PBS -N x\n" * (size // 80),
    "comments": lambda size: b"#!/bin/sh\n" + b"#\n" * (size // 16),
    "one line": lambda size: b"#" * size,
    "NULs": lambda size: HEAD + b"\0" * size,
}
OPTIONS = {
    "one variable": lambda size: ["-v", "A" * size],
    "variables": lambda size: ["-v", "A=1," * (size // 4)],
    "flags": lambda size: ["-" + "V" * (size // 8)],
    "options": lambda size: ["-N", "x"] * (size // 116),
}


def costs_little(work) -> None:
    """Check that the number of function calls is proportional to the size.

    Code that copies its data for each byte makes no more calls, but takes long: it is ended after
    ten seconds of CPU time, of which a tenth of a second is enough.
    """

    def over(*_: object) -> None:
        raise TimeoutError("ten seconds of CPU time")

    def attempt(size: int) -> None:
        try:
            work(size)
        except UsageError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 2000

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, 10)
    try:
        attempt(SIZE)
        assert calls(lambda: attempt(SIZE // 16)) < 10 * SIZE // 16
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_hostile_script_costs_root_little(name):
    costs_little(lambda size: describe(pbs.split_qsub([]), SCRIPTS[name](size)))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_cost_root_little(name):
    def work(size):
        described = describe(pbs.split_qsub(OPTIONS[name](size)), b"")
        return variables(described, {}, "h", "/")

    costs_little(work)


def outcome(split, text):
    try:
        return split(text)
    except ValueError:
        return None


def by_shlex(text, blanks):
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = blanks, True, ""
    return list(lexer)


@settings(deadline=None, max_examples=settings().max_examples * 3 // 2)
@given(st.text(st.sampled_from("ab1'\"\\,=# \t\r\n\v\u00a0"), max_size=12), st.booleans())
@example("a'b'\"c\"\\ d e", False)
@example("''", False)
@example('"\\a\\"\\\\"', False)
def test_words_are_split_as_shlex_does(text, commas):
    blanks = "," if commas else " \t\r\n"
    expected = outcome(lambda t: by_shlex(t, blanks), text)
    assert outcome(lambda t: pbs.split_words(t, blanks), text) == expected
    if not commas:
        assert outcome(shlex.split, text) == expected
