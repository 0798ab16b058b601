"""Texts of -vm, script directives, and requests as untrusted bytes."""

from __future__ import annotations

import base64
import json
import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api import submission, vm_options
from vtorque_core.api.directives import script_directives, strip_pbs_vm, vm_directives
from vtorque_core.api.submission import from_token, to_token, unpack_token
from vtorque_core.api.values import FileData, Option
from vtorque_core.base.errors import Refused
from vtorque_core.config.request import Request, make_request, merge_pairs, parse_vm

OPTIONS = {option.key: option for option in vm_options.vtorque_options()}

# -- the command line -------------------------------------------------------------------------


def test_pairs_of_several_arguments():
    assert parse_vm(["ram=1G, vcpus=2", "img=a=b"]) == [
        ("ram", "1G"),
        ("vcpus", "2"),
        ("img", "a=b"),
    ]
    assert parse_vm([]) == []


def test_vm_none_is_bare_metal_and_cannot_be_combined():
    assert parse_vm(["none"]) is None
    assert parse_vm([" none", "none"]) is None
    with pytest.raises(Refused, match="cannot be combined with other -vm options"):
        parse_vm(["none", "ram=1G"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ram=1G,ram=2G", "ram=2G: is given twice"),
        ("ram", "has no '='.*a comma separates pairs, so a value cannot contain"),
        ("img=a,b", "-vm b has no '='"),
        ("=x", "has no key"),
        ("ram=", "has no value"),
        ("", "empty -vm pair"),
        ("ram=1G,", "empty -vm pair"),
        ("img=a\0b", "NUL"),
        ("img=\udcff", "not valid UTF-8"),
        ("img=" + "x" * 5000, "more than 4096 characters"),
    ],
)
def test_bad_pairs_are_refused_in_one_line(value, message):
    with pytest.raises(Refused, match=message) as caught:
        parse_vm([value])
    assert "\n" not in str(caught.value)


def test_command_line_overrides_directives_key_by_key():
    assert merge_pairs(["ram=2G"], ["ram=1G,vcpus=2"]) == [("vcpus", "2"), ("ram", "2G")]
    assert merge_pairs([], ["ram=1G"]) == [("ram", "1G")]


def test_none_on_the_command_line_overrides_the_script_and_vice_versa():
    assert merge_pairs(["none"], ["ram=1G"]) is None
    assert merge_pairs([], ["none"]) is None
    assert merge_pairs(["ram=1G"], ["none"]) == [("ram", "1G")]
    assert merge_pairs([], []) == []


# -- directives -------------------------------------------------------------------------------

SCRIPT = b"""#!/bin/bash
#PBS -N caf\xe9

   # a comment
  #PBS -l nodes=1\r
: in the first column is not executable for PBS
#VSUB -vm ram=1G,vcpus=2
#PBS -vm img=old
echo run
#PBS -vm img=late
#VSUB -vm keep=true
"""


def test_directives_until_the_first_executable_line():
    assert script_directives(SCRIPT) == ("-N caf\udce9", "-l nodes=1", "-vm img=old")
    assert vm_directives(SCRIPT) == ("ram=1G,vcpus=2", "img=old")
    assert script_directives(SCRIPT, "") == ()
    assert script_directives(b"#DIR -N x", "#DIR") == ("-N x",)


def test_only_pbs_vm_lines_are_stripped():
    assert strip_pbs_vm(SCRIPT) == SCRIPT.replace(b"#PBS -vm img=old\n", b"")


def test_strip_keeps_line_ends():
    assert strip_pbs_vm(b"#!/bin/sh\r\n#PBS -vm a=b\r\n\xff\r\nx") == b"#!/bin/sh\r\n\xff\r\nx"
    assert strip_pbs_vm(b"#PBS -vm a=b") == b""


@given(st.binary() | st.lists(st.sampled_from([b"#PBS -N x", b"", b" ", b"ls", b"\r", b"#x"])))
def test_script_without_vm_is_never_changed(content):
    content = content if isinstance(content, bytes) else b"\n".join(content)
    if b"-vm" not in content:
        assert strip_pbs_vm(content) == content
        assert vm_directives(content.replace(b"#VSUB", b"")) == ()


def test_similar_pbs_options_are_left_to_qsub():
    content = b"#PBS -vmram=1\n#PBS -v vm\n#PBS -N 'it\n"
    assert vm_directives(content) == ()
    assert strip_pbs_vm(content) == content


@pytest.mark.parametrize(
    "line",
    [
        "#PBS -l nodes=1 -vm ram=1G",
        "#PBS -vm",
        "#VSUB ram=1G",
        "#VSUB",
        "#VSUB -vm 'a",
        "#VSUB -vm a -N b",
    ],
)
def test_directive_that_qsub_would_misread_is_refused(line):
    with pytest.raises(Refused, match="line 2 of the script"):
        vm_directives(f"#!/bin/sh\n{line}\n".encode())


def test_directive_with_quotes_and_comment():
    assert vm_directives(b"#VSUB -vm 'ram=1G, vcpus=2' # mine\n") == ("ram=1G, vcpus=2",)


# -- files ------------------------------------------------------------------------------------


def test_file_paths_are_relative_to_the_working_directory_or_home(tmp_path, monkeypatch):
    (tmp_path / "pre.sh").write_bytes(b"#!/bin/sh\n\xff")
    monkeypatch.setenv("HOME", str(tmp_path))
    pairs = [("ram", "1G"), ("vm_prologue", "pre.sh"), ("vm_epilogue", "~/pre.sh")]
    made = make_request(pairs, OPTIONS, "/bin/csh", cwd=tmp_path)
    script = FileData("pre.sh", b"#!/bin/sh\n\xff")
    assert made == Request(
        (("ram", "1G"),), {"vm_prologue": script, "vm_epilogue": script}, "/bin/csh"
    )


def test_word_for_a_word_or_file_option_stays_text(tmp_path):
    options = {"m": Option("m", str, "", "", is_file=True, words=frozenset({"on"}))}
    (tmp_path / "on").write_bytes(b"x")
    for text in ("on", "ON"):
        assert make_request([("m", text)], options, cwd=tmp_path) == Request((("m", text),))
    made = make_request([("m", "./on")], options, cwd=tmp_path)
    assert made.files == {"m": FileData("on", b"x")}


def test_unreadable_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "long").write_bytes(b"x" * (64 * 1024 + 1))
    (tmp_path / "full").write_bytes(b"x" * (64 * 1024))
    for name, message in [
        ("fifo", "is not a regular file"),
        ("long", "is longer than 64 KiB"),
        ("missing", "cannot be read: No such file"),
        (".", "cannot be read: Is a directory"),
        ("~nosuchuser/x", "the home of an unknown user"),
    ]:
        with pytest.raises(Refused, match=f"vm_prologue=.*: .*{message}"):
            make_request([("vm_prologue", name)], OPTIONS, cwd=tmp_path)
    assert make_request([("vm_prologue", "full")], OPTIONS, cwd=tmp_path).encode()


# -- bytes ------------------------------------------------------------------------------------

words = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=50)
keys = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)
names = st.text(
    st.characters(whitelist_categories=("L", "N"), whitelist_characters="._-"), max_size=50
)


@st.composite
def requests(draw):
    chosen = draw(st.lists(keys, unique=True, max_size=12))
    cut = draw(st.integers(0, len(chosen)))
    pairs = tuple((key, draw(words)) for key in chosen[:cut])
    files = {key: FileData(draw(names), draw(st.binary(max_size=200))) for key in chosen[cut:]}
    return Request(pairs, files, draw(st.none() | names))


@given(requests())
def test_encoded_requests_read_back(value):
    blob = value.encode()
    assert Request.decode(blob) == value
    assert blob.isascii()
    token = to_token(blob)
    assert token.isascii() and not set(token) & set(" ,=\"'$\\")
    assert b"".join(unpack_token(token)) == blob


def refused(blob: bytes) -> str:
    with pytest.raises(Refused) as caught:
        Request.decode(blob)
    line = str(caught.value)
    assert line.startswith("the job's request is invalid: ") and line.isprintable()
    assert len(line) < 400
    return line


GOOD = {"v": 1, "vm": [["ram", "1G"]], "files": {}, "shell": None}


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "Expecting value"),
        (b"x" * (128 * 1024 + 1), "limit: 131072"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"v":' * 20_000, "nested too deep"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b'{"v":1,"v":1}', "a key twice"),
        (b'{"v":NaN}', "NaN is not JSON"),
        (b'{"v":-Infinity}', "-Infinity is not JSON"),
        (b'{"v":' + b"9" * 5000 + b"}", "digits"),
        (b"{}", "exactly v, vm, files, shell"),
        (b"[]", "exactly v, vm, files, shell"),
    ],
)
def test_damaged_bytes_are_refused(blob, message):
    assert message in refused(blob)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": 2}, "version 1"),
        ({"v": True}, "version 1"),
        ({"v": 1.0}, "version 1"),
        ({"v": "1"}, "version 1"),
        ({"extra": 1}, "exactly"),
        ({"vm": {}}, "vm is not a list"),
        ({"vm": [["a", "b"]] * 201}, "at most 200"),
        ({"vm": [["ram"]]}, "list of two"),
        ({"vm": ["ab"]}, "list of two"),
        ({"vm": [["ram", 1]]}, "not text"),
        ({"vm": [["ram", "a\0"]]}, "NUL"),
        ({"vm": [["ram", "\ud800"]]}, "not valid UTF-8"),
        ({"vm": [["ram", "x" * 4097]]}, "4096"),
        ({"vm": [["Ram", "1"]]}, "lower-case"),
        ({"vm": [["ram\n", "1"]]}, "lower-case"),
        ({"vm": [[None, "1"]]}, "lower-case"),
        ({"vm": [["ram", "1"], ["ram", "2"]]}, "ram is given twice"),
        ({"files": {"ram": {"name": "x", "data": ""}}}, "ram is given twice"),
        ({"files": []}, "files is not an object"),
        ({"files": {"a" * i: {"name": "x", "data": ""} for i in range(1, 20)}}, "at most 16"),
        ({"files": {"f": {"name": "x"}}}, "exactly name, data"),
        ({"files": {"f": {"name": "../x", "data": ""}}}, "slash"),
        ({"files": {"f": {"name": "x\n", "data": ""}}}, "control"),
        ({"files": {"f": {"name": "x", "data": "a\nbc="}}}, "base64"),
        ({"files": {"f": {"name": "x", "data": "é"}}}, "base64"),
        ({"files": {"f": {"name": "x", "data": "A" * 90_000}}}, "limit: 65536"),
        ({"files": {"F": {"name": "x", "data": ""}}}, "lower-case"),
        ({"shell": 5}, "shell is not text"),
        ({"shell": "/bin/sh\n"}, "control characters"),
    ],
)
def test_forged_fields_are_refused(change, message):
    assert Request.decode(json.dumps(GOOD).encode()).pairs == (("ram", "1G"),)
    assert message in refused(json.dumps(GOOD | change).encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.binary() | json_values.map(lambda v: json.dumps(v).encode()))
def test_arbitrary_bytes_are_refused(blob):
    refused(blob)


@given(st.sampled_from(sorted(GOOD)), json_values)
def test_any_value_of_a_field_is_read_or_refused(name, value):
    try:
        assert isinstance(Request.decode(json.dumps(GOOD | {name: value}).encode()), Request)
    except Refused as error:
        assert str(error).isprintable()


def test_two_files_of_the_greatest_size_do_not_fit():
    files = {key: FileData("x", os.urandom(64 * 1024)) for key in ("vm_prologue", "vm_epilogue")}
    with pytest.raises(Refused, match="limit: 131072 bytes"):
        Request(files=files).encode()


# -- tokens -----------------------------------------------------------------------------------


def token_of(data: bytes) -> str:
    return "vt1:" + base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_token_is_compressed_if_shorter():
    assert len(to_token(b"a" * 10_000)) < 100
    assert to_token(b"{}") == token_of(b"\0{}")


def test_compressed_bomb_is_not_unpacked():
    bomb = token_of(b"\1" + zlib.compress(b"\0" * 20_000_000, 9))
    assert len(bomb) < 30_000
    with pytest.raises(Refused, match="larger than 131072 bytes"):
        from_token(bomb)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "vt1:",
        "vt2:AAAA",
        "vt1:AA=A",
        "vt1:AAAA\n",
        "vt1:A",
        "vt1:+/+/",
        "vt1:" + "A" * 200_000,
        token_of(b"\2x"),
        token_of(b"\1junk"),
        token_of(b"\1" + zlib.compress(b"x" * 99)[:-2]),
        token_of(b"\1" + zlib.compress(b"x" * 99) + b"more"),
    ],
)
def test_bad_tokens_are_refused(token):
    with pytest.raises(Refused, match="the job's request is invalid"):
        from_token(token)


@given(st.text() | st.binary().map(token_of) | st.binary().map(lambda b: token_of(b"\1" + b)))
def test_any_token_is_decoded_or_refused(token):
    try:
        assert len(b"".join(unpack_token(token))) <= submission.MAX_REQUEST
    except Refused as error:
        assert str(error).isprintable()
