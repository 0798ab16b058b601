"""Forged requests that a user could submit, with root's exact answer to each.

The keys of the tables are the names of the attacks in doc/generated/security-tests.md. The tests
that use :mod:`guards` check that a guard refuses each attack.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib

from vtorque_core.api.vm_options import vtorque_options

DAMAGED = "the job's request is invalid: "
FIELDS = "the document is not an object with exactly v, vm, files, shell"
KEY = "a -vm key is not a short lower-case word"
VERSION = "it is not of version 1: submit the job again"
SHELL = "shell"  # the keyword form looks like subprocess's
FILE_NAME = "a file's name has a slash or control characters"


def document(**change: object) -> bytes:
    return json.dumps({"v": 1, "vm": [], "files": {}, "shell": None} | change).encode()


def file_document(**change: object) -> bytes:
    return document(files={"vm_prologue": {"name": "x", "data": ""} | change})


# -- bytes ----------------------------------------------------------------------------------------

BLOBS = {
    "empty": (b"", "Expecting value: line 1 column 1 (char 0)"),
    "NULs": (b"\0" * 10, "Expecting value: line 1 column 1 (char 0)"),
    "byte order mark": (
        b"\xef\xbb\xbf" + document(),
        "Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)",
    ),
    "UTF-16": (document().decode().encode("utf-16"), "it is not UTF-8"),
    "overlong UTF-8 encoding of a slash": (b'{"v":1,"vm":[["img","\xc0\xaf"]]}', "it is not UTF-8"),
    "deeply nested lists": (b'{"v":' + b"[" * 60_000, "it is nested too deep"),
    "deeply nested objects": (b'{"v":' * 20_000, "it is nested too deep"),
    "10 MB": (b"x" * 10_000_000, "has 10000000 bytes (limit: 131072)"),
    "spaces beyond the limit": (b" " * 131_073, "has 131073 bytes (limit: 131072)"),
    "two documents": (document() * 2, "Extra data: line 1 column 47 (char 46)"),
    "NUL at the end": (document() + b"\0", "Extra data: line 1 column 47 (char 46)"),
    "duplicate JSON key": (b'{"v":1,"vm":[],"vm":[["ram","1T"]]}', "a JSON object has a key twice"),
    "duplicate JSON key in a nested object": (
        b'{"v":1,"vm":[],"files":{"a":{"name":"x","name":"y","data":""}},"shell":null}',
        "a JSON object has a key twice",
    ),
    "NaN": (b'{"v":1,"vm":[["ram",NaN]]}', "NaN is not JSON"),
    "infinity as an exponent": (b'{"v":1e400,"vm":[],"files":{},"shell":null}', VERSION),
    "negative zero": (b'{"v":-0,"vm":[],"files":{},"shell":null}', VERSION),
    "version as text": (document(v="1"), VERSION),
    "version as float": (document(v=1.0), VERSION),
    "version as boolean": (document(v=True), VERSION),
    "later version": (document(v=2), VERSION),
    "additional field uid": (document(uid=0), FIELDS),
    "additional field job": (document(job="1.other"), FIELDS),
    "additional field __proto__": (document(__proto__={}), FIELDS),
    "pairs as object": (document(vm={"img": "micro"}), "vm is not a list of at most 200"),
    "201 pairs": (document(vm=[["a", "b"]] * 201), "vm is not a list of at most 200"),
    "pair of three": (document(vm=[["a", "b", "c"]]), "a -vm pair is not a list of two"),
    "list as key": (document(vm=[[["img"], "micro"]]), KEY),
    "key with a dot": (document(vm=[["img.x", "1"]]), KEY),
    "key with Kelvin sign": (document(vm=[["\u212aeep", "1"]]), KEY),
    "key with dotless i": (document(vm=[["d\u0131sk", "1"]]), KEY),
    "long key": (document(vm=[["a" * 65, "1"]]), KEY),
    "list as value": (document(vm=[["img", ["micro"]]]), "a -vm value is not text"),
    "lone surrogate": (document(vm=[["img", "\ud800"]]), "a -vm value is not valid UTF-8"),
    "NUL in a value": (document(vm=[["img", "micro\0"]]), "a -vm value has a NUL character"),
    "duplicate -vm key": (document(vm=[["img", "a"], ["img", "b"]]), "key img is given twice"),
    "path as a file's name": (file_document(name="/etc/shadow"), FILE_NAME),
    "right-to-left override in a file's name": (file_document(name="x\u202egpj"), FILE_NAME),
    "long name of a file": (
        file_document(name="x" * 256), "a file's name has more than 255 characters"
    ),
    "NUL in a file's name": (file_document(name="x\0y"), "a file's name has a NUL character"),
    "additional field mode of a file": (
        file_document(mode=0o4755), "a file is not an object with exactly name, data"
    ),
    "path in place of a file": (document(files={"f": "/etc/shadow"}),
                     "a file is not an object with exactly name, data"),
    "URL-safe base64": (file_document(data="_-_-"), "a file is not base64"),
    "newline in base64": (file_document(data="AAAA\n"), "a file is not base64"),
    "large file": (file_document(data="A" * 100_000), "a file has 75000 bytes (limit: 65536)"),
    "list as shell": (document(**{SHELL: ["/bin/sh", "-c"]}), "shell is not text"),
    "newline in the shell": (document(**{SHELL: "/bin/sh\nid"}), "shell has control characters"),
    "terminal escape sequence in the shell": (
        document(**{SHELL: "/bin/sh\x1b[2J"}), "shell has control characters"
    ),
    "truncated document": (
        document()[:-9], "Unterminated string starting at: line 1 column 33 (char 32)"
    ),
    "null": (b"null", FIELDS),
    "list in place of the document": (b'["v","vm","files","shell"]', FIELDS),
    "text in place of the document": (b'"v vm files shell"', FIELDS),
    "missing field": (b'{"v":1,"vm":[],"files":{}}', FIELDS),
    "null in place of the pairs": (document(vm=None), "vm is not a list of at most 200"),
    "null in place of the files": (document(files=None), "files is not an object of at most 16"),
    "17 files": (
        document(files={f"f{n}": {"name": "x", "data": ""} for n in range(17)}),
        "files is not an object of at most 16",
    ),
    "negative infinity": (b'{"v":-Infinity}', "-Infinity is not JSON"),
    "infinity as value": (b'{"v":1,"vm":[["ram",1e999]],"files":{},"shell":null}',
                            "a -vm value is not text"),
    "object as value": (document(vm=[["img", {"$ref": "/etc/shadow"}]]), "a -vm value is not text"),
    "boolean as value": (document(vm=[["keep", True]]), "a -vm value is not text"),
    "null as value": (document(vm=[["img", None]]), "a -vm value is not text"),
    "value of 4097 characters": (document(vm=[["img", "x" * 4097]]),
                      "a -vm value has more than 4096 characters"),
    "surrogate in the shell": (document(**{SHELL: "\udcff"}), "shell is not valid UTF-8"),
    "surrogate in a file's name": (
        file_document(name="\udc80"), "a file's name is not valid UTF-8"
    ),
    "surrogate in a key": (document(vm=[["im\udc67", "x"]]), KEY),
    "key and file of the same name": (
        document(vm=[["f", "x"]], files={"f": {"name": "x", "data": ""}}), "key f is given twice"
    ),
    "truncated base64": (file_document(data="AAAAA"), "a file is not base64"),
    "list as a file's content": (file_document(data=[0, 1]), "a file is not text"),
    "valid request beyond the limit": (document() + b" " * 131_072,
                                  "has 131118 bytes (limit: 131072)"),
    "long shell": (document(shell="/" + "x" * 4096), "shell has more than 4096 characters"),
}  # fmt: skip


# -- tokens ---------------------------------------------------------------------------------------


def token(data: bytes) -> str:
    return "vt1:" + base64.urlsafe_b64encode(data).decode().rstrip("=")


NO_TOKEN = "it is not a vt1 token"
BROKEN = "the token cannot be decompressed"
TOO_MUCH = "the decompressed token is larger than 131072 bytes"
TOKENS = {
    "empty": ("vt1:", NO_TOKEN),
    "upper case": ("VT1:AAAA", NO_TOKEN),
    "space": ("vt1:AA AA", NO_TOKEN),
    "one base64 character": ("vt1:A", "the token is not base64"),
    "another version": ("vt2:AHt9", NO_TOKEN),
    "leading space": (" vt1:AHt9", NO_TOKEN),
    "decompression bomb in a decompression bomb": (
        token(b"\1" + zlib.compress(b"\1" + zlib.compress(b"[" * 9_000_000, 9) * 900, 9)),
        TOO_MUCH,
    ),
    "padding": ("vt1:AAA=", NO_TOKEN),
    "newline": (token(b"\0{}") + "\n", NO_TOKEN),
    "Cyrillic A": ("vt1:\u0410AAA", NO_TOKEN),
    "slash": ("vt1:AA/A", NO_TOKEN),
    "text of another resource": ("vt1:AAAA,nodes=9", NO_TOKEN),
    "400 kB": ("vt1:" + "A" * 400_000, NO_TOKEN),
    "unknown type": (token(b"\7{}"), "the token's type is unknown"),
    "decompression bomb": (token(b"\1" + zlib.compress(b"[" * 30_000_000, 9)), TOO_MUCH),
    "gzip": (token(b"\1" + gzip.compress(b"{}")), BROKEN),
    "preset dictionary": (token(b"\1\x78\xbb" + b"abcd" * 4), BROKEN),
    "wrong checksum": (token(b"\1" + zlib.compress(b"x" * 60)[:-1] + b"?"), BROKEN),
    "truncated stream": (token(b"\1" + zlib.compress(b"{}" * 50)[:-5]), TOO_MUCH),
    "two streams": (token(b"\1" + zlib.compress(b"{}") * 2), TOO_MUCH),
}


# -- policy ---------------------------------------------------------------------------------------

SITE = b"""
[options.ram]
max = "4G"
[options.img]
default = "micro"
allow = ["micro"]
[options.vcpus]
min = 2
default = 2
[options.distro]
deny = ["old*"]
[options.disk]
allow = ["/data/*"]
"""
SIZE = "is not a size: write a whole number with K, M, G or T, like 512M or 2G"
WHOLE = "is not a whole number of MiB between 1M and 1048576T"
NAME = "is not a name: use 1 to 100 letters, digits, dots, dashes, plus signs or underscores"
AMBIGUOUS = "is ambiguous (the old vTorque took 0 for enabled): write true or false instead"
NOT_ABSOLUTE = "is not an absolute path: start it with /"
BY = "in /etc/vtorque/vtorque.toml)"
NOT_ALLOWED = f"is not allowed (limit: micro, set by [options.img] allow {BY}"
KNOWN = ", ".join(sorted(option.key for option in vtorque_options()))
UNKNOWN = f"there is no -vm key with this name; known keys: {KNOWN}"
PAIRS = {
    ("ram", "999999999999999T"): WHOLE,
    ("ram", "0"): WHOLE,
    ("ram", "-1G"): SIZE,
    ("ram", "1.5G"): SIZE,
    ("ram", "1e3"): SIZE,
    ("ram", "1_0G"): SIZE,
    ("ram", "\u0661G"): SIZE,
    ("ram", "5G"): f"is more than allowed (limit: 4G, set by [options.ram] max {BY}",
    ("vcpus", "1"): f"is less than allowed (limit: 2, set by [options.vcpus] min {BY}",
    ("vcpus", "0"): "is not between 1 and 1024",
    ("vcpus", "1025"): "is not between 1 and 1024",
    ("vcpus", "9999999999"): "is not a whole number",
    ("vcpus", "0x10"): "is not a whole number",
    ("vcpus", "-1"): "is not a whole number",
    ("vms_per_node", "65"): "is not between 1 and 64",
    ("img", "/etc/passwd"): NOT_ALLOWED,
    ("img", "../micro"): NOT_ALLOWED,
    ("img", "micro'/><x"): NOT_ALLOWED,
    ("img", "a/\x1b[2J"): "has a control character or more than 1024 bytes",
    ("img", ".."): NAME,
    ("img", ".staging-x"): NAME,
    ("img", "*"): NAME,
    ("img", "micro\n"): NAME,
    ("img", "debian"): NOT_ALLOWED,
    ("img", "MICRO"): NOT_ALLOWED,
    ("distro", "$(id)"): NAME,
    ("distro", "old-and-open"): (
        f"is not allowed (limit: not old*, set by [options.distro] deny {BY}"
    ),
    ("arch", "x86_64;reboot"): (
        "is not an architecture: write one of aarch64, ppc64le, riscv64, s390x, x86_64"
    ),
    ("fs_type", "ext4"): "is not a file system type: write one of sharedfs, ramdisk",
    ("keep", "0"): AMBIGUOUS,
    ("keep", "1"): AMBIGUOUS,
    ("keep", "maybe"): (
        "is not a boolean: write true or false (or enabled/disabled, yes/no, on/off)"
    ),
    ("disk", "disk.img"): NOT_ABSOLUTE,
    ("disk", "nbd://10.0.0.1/x"): NOT_ABSOLUTE,
    ("disk", 'json:{"driver":"host_device"}'): NOT_ABSOLUTE,
    ("disk", "/data/../etc/shadow"): "contains '..': write the path without it",
    ("disk", "/data/a\nb"): "has a control character or more than 1024 bytes",
    ("disk", "/data/"): "is a directory: write the path of a disk file",
    ("disk", "/etc/shadow"): f"is not allowed (limit: /data/*, set by [options.disk] allow {BY}",
    ("vm_prologue", "/etc/shadow"): "the value must be the content of a file, not its name",
    ("qemu_args", "-monitor"): UNKNOWN,
    ("shares", "/"): UNKNOWN,
    ("zz", "\x1b[2J"): UNKNOWN,
}
