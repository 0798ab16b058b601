"""What a user could write by hand where their request travels, and the exact refusal of each.

The node reads all of this as root. Every refusal is one printable line; nothing else is raised.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import zlib
from pathlib import Path

import pytest

from vtorque_core import api_options, names
from vtorque_core.api import FileData
from vtorque_core.batch import pbs_convention as pbs
from vtorque_core.config import build, parse_toml
from vtorque_core.errors import Refused, UsageError
from vtorque_core.plugins import Plugins
from vtorque_core.policy import decide
from vtorque_core.request import Request, from_token

ME = os.getuid()
DAMAGED = "the job's request is damaged: "
FIELDS = "the document is not an object with exactly v, vm, files, shell"
KEY = "a -vm key is not a short lower-case word"
VERSION = "it is not of version 1: submit the job anew"
SHELL = "shell"  # as a keyword it looks like subprocess's
FILE_NAME = "a file's name has a slash or control characters"


def document(**change: object) -> bytes:
    return json.dumps({"v": 1, "vm": [], "files": {}, "shell": None} | change).encode()


def file_document(**change: object) -> bytes:
    return document(files={"vm_prologue": {"name": "x", "data": ""} | change})


# -- bytes ----------------------------------------------------------------------------------------

BLOBS = {
    "nothing": (b"", "Expecting value: line 1 column 1 (char 0)"),
    "NULs": (b"\0" * 10, "Expecting value: line 1 column 1 (char 0)"),
    "byte order mark": (
        b"\xef\xbb\xbf" + document(),
        "Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)",
    ),
    "UTF-16": (document().decode().encode("utf-16"), "it is not UTF-8"),
    "overlong slash": (b'{"v":1,"vm":[["img","\xc0\xaf"]]}', "it is not UTF-8"),
    "deep lists": (b'{"v":' + b"[" * 60_000, "it is nested too deep"),
    "deep objects": (b'{"v":' * 20_000, "it is nested too deep"),
    "10 MB": (b"x" * 10_000_000, "has 10000000 bytes (limit: 131072)"),
    "blanks beyond the limit": (b" " * 131_073, "has 131073 bytes (limit: 131072)"),
    "two documents": (document() * 2, "Extra data: line 1 column 47 (char 46)"),
    "NUL at the end": (document() + b"\0", "Extra data: line 1 column 47 (char 46)"),
    "a key twice": (b'{"v":1,"vm":[],"vm":[["ram","1T"]]}', "a key of an object is there twice"),
    "a key twice, deep": (
        b'{"v":1,"vm":[],"files":{"a":{"name":"x","name":"y","data":""}},"shell":null}',
        "a key of an object is there twice",
    ),
    "NaN": (b'{"v":1,"vm":[["ram",NaN]]}', "NaN is not JSON"),
    "infinity by exponent": (b'{"v":1e400,"vm":[],"files":{},"shell":null}', VERSION),
    "minus zero": (b'{"v":-0,"vm":[],"files":{},"shell":null}', VERSION),
    "version as text": (document(v="1"), VERSION),
    "version as float": (document(v=1.0), VERSION),
    "version as boolean": (document(v=True), VERSION),
    "version of the future": (document(v=2), VERSION),
    "a uid beside it": (document(uid=0), FIELDS),
    "another job's id beside it": (document(job="1.other"), FIELDS),
    "__proto__": (document(__proto__={}), FIELDS),
    "pairs as object": (document(vm={"img": "micro"}), "vm is not a list of at most 200"),
    "201 pairs": (document(vm=[["a", "b"]] * 201), "vm is not a list of at most 200"),
    "three in a pair": (document(vm=[["a", "b", "c"]]), "a -vm pair is not a list of two"),
    "key as list": (document(vm=[[["img"], "micro"]]), KEY),
    "key with a dot": (document(vm=[["img.x", "1"]]), KEY),
    "key with Kelvin sign": (document(vm=[["\u212aeep", "1"]]), KEY),
    "key with dotless i": (document(vm=[["d\u0131sk", "1"]]), KEY),
    "long key": (document(vm=[["a" * 65, "1"]]), KEY),
    "value as list": (document(vm=[["img", ["micro"]]]), "a -vm value is not text"),
    "lone surrogate": (document(vm=[["img", "\ud800"]]), "a -vm value is not valid UTF-8"),
    "NUL in a value": (document(vm=[["img", "micro\0"]]), "a -vm value has a NUL character"),
    "key twice": (document(vm=[["img", "a"], ["img", "b"]]), "key img is given twice"),
    "file's path": (file_document(name="/etc/shadow"), FILE_NAME),
    "file's name turned round": (file_document(name="x\u202egpj"), FILE_NAME),
    "file's long name": (
        file_document(name="x" * 256), "a file's name has more than 255 characters"
    ),
    "file with a mode": (
        file_document(mode=0o4755), "a file is not an object with exactly name, data"
    ),
    "file as path": (document(files={"f": "/etc/shadow"}),
                     "a file is not an object with exactly name, data"),
    "base64 of URLs": (file_document(data="_-_-"), "a file is not base64"),
    "base64 with line end": (file_document(data="AAAA\n"), "a file is not base64"),
    "large file": (file_document(data="A" * 100_000), "a file has 75000 bytes (limit: 65536)"),
    "shell as words": (document(**{SHELL: ["/bin/sh", "-c"]}), "shell is not text"),
    "shell with a line end": (document(**{SHELL: "/bin/sh\nid"}), "shell has control characters"),
    "shell that clears screens": (
        document(**{SHELL: "/bin/sh\x1b[2J"}), "shell has control characters"
    ),
    "long shell": (document(shell="/" + "x" * 4096), "shell has more than 4096 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOBS)
def test_hostile_bytes_are_refused_in_these_words(name):
    blob, words = BLOBS[name]
    with pytest.raises(Refused) as caught:
        Request.decode(blob)
    assert str(caught.value) == DAMAGED + words


def test_a_number_beyond_pythons_digits_is_refused():
    with pytest.raises(Refused) as caught:
        Request.decode(b'{"v":' + b"1" * 100_000 + b"}")
    assert str(caught.value).startswith(DAMAGED) and str(caught.value).isprintable()


# -- tokens ---------------------------------------------------------------------------------------


def token(data: bytes) -> str:
    return "vt1:" + base64.urlsafe_b64encode(data).decode().rstrip("=")


NO_TOKEN = "it is not a vt1 token"
BROKEN = "its token does not decompress"
TOO_MUCH = "its token does not decompress to at most 131072 bytes"
TOKENS = {
    "empty": ("vt1:", NO_TOKEN),
    "upper case": ("VT1:AAAA", NO_TOKEN),
    "blank": ("vt1:AA AA", NO_TOKEN),
    "padding": ("vt1:AAA=", NO_TOKEN),
    "line end": (token(b"\0{}") + "\n", NO_TOKEN),
    "Cyrillic A": ("vt1:\u0410AAA", NO_TOKEN),
    "slash": ("vt1:AA/A", NO_TOKEN),
    "another resource": ("vt1:AAAA,nodes=9", NO_TOKEN),
    "400 kB": ("vt1:" + "A" * 400_000, NO_TOKEN),
    "unknown kind": (token(b"\7{}"), "its token is of an unknown kind"),
    "bomb": (token(b"\1" + zlib.compress(b"[" * 30_000_000, 9)), TOO_MUCH),
    "gzip": (token(b"\1" + gzip.compress(b"{}")), BROKEN),
    "asks for a dictionary": (token(b"\1\x78\xbb" + b"abcd" * 4), BROKEN),
    "wrong checksum": (token(b"\1" + zlib.compress(b"x" * 60)[:-1] + b"?"), BROKEN),
    "cut": (token(b"\1" + zlib.compress(b"{}" * 50)[:-5]), TOO_MUCH),
    "two streams": (token(b"\1" + zlib.compress(b"{}") * 2), TOO_MUCH),
}


@pytest.mark.parametrize("name", TOKENS)
def test_hostile_tokens_are_refused_in_these_words(name):
    text, words = TOKENS[name]
    with pytest.raises(Refused) as caught:
        from_token(text)
    assert str(caught.value) == DAMAGED + words


# -- policy ---------------------------------------------------------------------------------------

SITE = b"""
[options.ram]
max = "4G"
[options.img]
default = "micro"
allow = ["micro"]
[options.disk]
allow = ["/data/*"]
"""
SIZE = "is not a size: write a whole number with K, M, G or T, like 512M or 2G"
WHOLE = "is not a whole number of MiB between 1M and 1048576T"
NAME = "is not a name: use 1 to 100 letters, digits, dots, dashes, plus signs or underscores"
PATH = "is a path: write the name of an image in the pool (vmgr images list)"
AMBIGUOUS = "is ambiguous (the old vTorque took 0 for enabled): write true or false instead"
NOT_ABSOLUTE = "is not an absolute path: start it with /"
BY = "in /etc/vtorque/vtorque.toml)"
UNKNOWN = (
    "there is no -vm key of that name; known keys: arch, disk, distro, fs_type, img, keep, ram, "
    "vcpus, vm_epilogue, vm_prologue, vms_per_node"
)
PAIRS = {
    ("ram", "999999999999999T"): WHOLE,
    ("ram", "0"): WHOLE,
    ("ram", "-1G"): SIZE,
    ("ram", "1.5G"): SIZE,
    ("ram", "1e3"): SIZE,
    ("ram", "1_0G"): SIZE,
    ("ram", "\u0661G"): SIZE,
    ("ram", "5G"): f"is more than allowed (limit: 4G, set by [options.ram] max {BY}",
    ("vcpus", "0"): "is not between 1 and 1024",
    ("vcpus", "1025"): "is not between 1 and 1024",
    ("vcpus", "9999999999"): "is not a whole number",
    ("vcpus", "0x10"): "is not a whole number",
    ("vcpus", "-1"): "is not a whole number",
    ("vms_per_node", "65"): "is not between 1 and 64",
    ("img", "/etc/passwd"): PATH,
    ("img", "../micro"): PATH,
    ("img", "micro'/><x"): PATH,
    ("img", ".."): NAME,
    ("img", ".staging-x"): NAME,
    ("img", "*"): NAME,
    ("img", "micro\n"): NAME,
    ("img", "debian"): f"is not allowed (limit: micro, set by [options.img] allow {BY}",
    ("img", "MICRO"): f"is not allowed (limit: micro, set by [options.img] allow {BY}",
    ("distro", "$(id)"): NAME,
    ("arch", "x86_64;reboot"): (
        "is not an architecture: write one of aarch64, ppc64le, riscv64, s390x, x86_64"
    ),
    ("fs_type", "ext4"): "is not a file system type: write one of sharedfs, ramdisk",
    ("keep", "0"): AMBIGUOUS,
    ("keep", "1"): AMBIGUOUS,
    ("disk", "disk.img"): NOT_ABSOLUTE,
    ("disk", "nbd://10.0.0.1/x"): NOT_ABSOLUTE,
    ("disk", 'json:{"driver":"host_device"}'): NOT_ABSOLUTE,
    ("disk", "/data/../etc/shadow"): "has '..' in it: write the path without",
    ("disk", "/data/a\nb"): "has a control character or more than 1024 bytes",
    ("disk", "/data/"): "names a directory: write the path of a raw disk file",
    ("disk", "/etc/shadow"): f"is not allowed (limit: /data/*, set by [options.disk] allow {BY}",
    ("vm_prologue", "/etc/shadow"): "the value must be a file, which must travel as data",
    ("qemu_args", "-monitor"): UNKNOWN,
    ("shares", "/"): UNKNOWN,
    ("zz", "\x1b[2J"): UNKNOWN,
}


@pytest.fixture(scope="module")
def loaded():
    made = Plugins()
    made.register("core", api_options, "vtorque-core")
    return made


@pytest.fixture(scope="module")
def site(loaded):
    return build(parse_toml(SITE, Path("/etc/vtorque/vtorque.toml")), loaded)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: ascii("=".join(pair)))
def test_hostile_values_are_refused_in_these_words(pair, site, loaded):
    key, value = pair
    shown = value.replace("\n", "\\n").replace("\x1b", "\\x1b")
    with pytest.raises(Refused) as caught:
        decide(Request.decode(document(vm=[list(pair)])), site, loaded)
    assert str(caught.value) == f"{key}={shown}: {PAIRS[pair]}"


def test_text_where_a_file_belongs_and_the_other_way_round(site, loaded):
    with pytest.raises(Refused) as caught:
        decide(Request(files={"img": FileData("micro", b"")}), site, loaded)
    assert str(caught.value) == "img=micro: the value must be text, not a file"


# -- the batch system's arguments -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "0 arguments; Torque gives 6 to 8"),
        (["1.x"], "1 arguments; Torque gives 6 to 8"),
        (["x"] * 12, "12 arguments; Torque gives 6 to 8"),
        (["", "u", "g", "n", "r", "q"], "no job id or no user in the first two arguments"),
        (["1.x", "", "g", "n", "r", "q"], "no job id or no user in the first two arguments"),
    ],
)
def test_hostile_hook_arguments(argv, words):
    with pytest.raises(ValueError) as caught:
        pbs.PrologueArgs.parse(argv)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("resources", "word"),
    [
        ("nodes=1,other=vt1:a,other=vt1:b", "vt1:b"),  # Torque: the last of a key counts
        ("other=x,vt1:a,vt1:b", "vt1:a"),  # the first word of it
        ("other=VT1:a", None),
        ("walltime=vt1:a", None),
        ("nodes=vt1:a", None),
        ("vt1:a", None),
    ],
)
def test_where_a_request_is_looked_for(resources, word):
    assert pbs.request_token(pbs.parse_resources(resources)) == word


@pytest.mark.parametrize(
    "text", ["1:ppn=99999999", "1:ppn=-4", "1:ppn=\u0661", "1+1:ppn=8", "1:ppn="]
)
def test_hostile_processor_counts_are_one(text):
    assert pbs.ppn(text) == 1


@pytest.mark.parametrize(
    "name", ["a/b", "../x", "-rf", "a b", "a\n", "", "x" * 231, "\u00e9", ".x"]
)
def test_hostile_job_names_are_refused(name):
    with pytest.raises(UsageError, match="a job name starts with a letter and has up to 230"):
        pbs.check_job_name(name)


@pytest.mark.parametrize(
    "job_id",
    [
        "../../etc",
        "..",
        ".",
        "",
        "/",
        "-rf",
        "1\n2",
        "a\0b",
        "x" * 300,
        "\udcff",
        "1;reboot",
        "$(id)",
    ],
)
def test_paths_of_hostile_job_ids_stay_where_they_belong(job_id):
    paths = names.Paths(Path("/s"), Path("/r"))
    key = names.job_key(job_id, 0)
    for path, parent in (
        (paths.job_state(key), "/s/jobs"),
        (paths.job_run(key), "/r/jobs"),
        (paths.proof(job_id), "/r/proof"),
        (paths.job_lock(job_id), "/r/locks"),
    ):
        assert os.path.normpath(path) == str(path)
        assert str(path.parent) == parent
        assert path.name.isascii() and path.name.isprintable() and len(path.name) < 80
        assert not path.name.startswith((".", "-"))


def test_hostile_job_ids_have_paths_of_their_own():
    ids = ["1[0].s", "1_0_.s", "1/0/.s", "1 0 .s", "1\n0\n.s", "x" * 51, "x" * 52]
    assert len({names.safe_name(each) for each in ids}) == len(ids)
