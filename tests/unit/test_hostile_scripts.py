"""Job scripts and options that cost root much to read: the embedded batch system does that as root.

Python's shlex takes four minutes for one line of 4 MiB, and no other user is served meanwhile.
"""

from __future__ import annotations

import shlex
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vtorque_core.batch import pbs_convention as pbs
from vtorque_core.batch.qsub import variables
from vtorque_core.errors import UsageError
from vtorque_core.local.submitter import describe

SIZE = 1 << 20  # a quarter of the longest script; shlex: about a minute
SMALL = SIZE >> 3
HEAD = b"#!/bin/sh\n#PBS "
SCRIPTS = {
    "a long word": HEAD + b"-v A=" + b"x" * SIZE,
    "a quote without an end": HEAD + b"-v A='" + b"x" * SIZE,
    "a double quote without an end": HEAD + b'-v A="' + b"\\x" * (SIZE // 2),
    "escapes": HEAD + b"-v A=" + b"\\x" * (SIZE // 2),
    "quotes": HEAD + b"-v A=" + b"''" * (SIZE // 2),
    "words": HEAD + b"-V " * (SMALL // 3),
    "resources": HEAD + b"-l " + b"a=1," * (SMALL // 4),
    "one resource": HEAD + b"-l nodes=1" + b",1" * (SIZE // 2),
    "lines": b"#!/bin/sh\n" + b"#PBS -N x\n" * (SMALL // 10),
    "comments": b"#!/bin/sh\n" + b"#\n" * (SMALL // 2),
    "one line": b"#" * SIZE,
    "NULs": HEAD + b"\0" * SIZE,
}


def seconds(work) -> float:
    start = time.process_time()
    try:
        work()
    except UsageError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 2000
    return time.process_time() - start


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_costs_root_little(name):
    assert seconds(lambda: describe(pbs.split_qsub([]), SCRIPTS[name])) < 5


@pytest.mark.parametrize(
    "argv",
    [["-v", "A" * SIZE], ["-v", "A=1," * (SIZE // 4)], ["-" + "V" * SMALL], ["-N", "x"] * 9_000],
    ids=["a variable", "variables", "flags", "options"],
)
def test_options_cost_root_little(argv):
    assert seconds(lambda: variables(describe(pbs.split_qsub(argv), b""), {}, "h", "/")) < 5


def ends(split, text):
    try:
        return split(text)
    except ValueError:
        return None


def by_shlex(text, blanks):
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = blanks, True, ""
    return list(lexer)


@settings(deadline=None, max_examples=150)
@given(st.text(st.sampled_from("ab1'\"\\,=# \t\r\n\v\u00a0"), max_size=12), st.booleans())
@example("a'b'\"c\"\\ d e", False)
@example("''", False)
@example('"\\a\\"\\\\"', False)
def test_words_are_split_as_shlex_does(text, commas):
    blanks = "," if commas else " \t\r\n"
    expected = ends(lambda t: by_shlex(t, blanks), text)
    assert ends(lambda t: pbs.split_words(t, blanks), text) == expected
    if not commas:
        assert ends(shlex.split, text) == expected
