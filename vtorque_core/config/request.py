"""Parse ``-vm`` options into a :class:`Request`, which ``vsub`` sends to the node as bytes.

On the node the bytes are untrusted, and any error becomes Refused.
"""

from __future__ import annotations

import json
import os
import re
import stat
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from vtorque_core.api.submission import MAX_REQUEST, refuse
from vtorque_core.api.values import FileData, Option
from vtorque_core.base.errors import Refusal, Refused, printable
from vtorque_core.base.suggest import hint

VERSION = 1
BARE_METAL = "none"  # -vm none
MAX_FILE = 64 * 1024  # bytes of one file that the user names
MAX_PAIRS = 200
MAX_FILES = 16
MAX_VALUE = 4096  # characters of one value: PATH_MAX (limits.h) is the longest that makes sense
MAX_FILE_NAME = 255  # NAME_MAX (limits.h)

_KEY = re.compile(rb"[a-z][a-z0-9_]{0,63}")
_VALUE, _FILE, _SHELL = b"v", b"f", b"s"  # kinds of a request's parts

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Request:
    """The ``-vm`` pairs of one job as the user wrote them, and the files that they name.

    ``shell`` is the user's ``-S``.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    files: Mapping[str, FileData] = field(default_factory=dict)
    shell: str | None = None

    def encode(self) -> bytes:
        files = {
            key: {"name": f.name, "data": b64encode(f.content).decode()}
            for key, f in self.files.items()
        }
        document = {"v": VERSION, "vm": list(self.pairs), "files": files, "shell": self.shell}
        blob = json.dumps(document, separators=(",", ":")).encode()
        if len(blob) > MAX_REQUEST:
            said = f"the request is {len(blob)} bytes with the files that it names"
            fix = "shorten the scripts, and call others in your home from them"
            raise Refused(said, limit=f"{MAX_REQUEST} bytes", fix=fix)
        Request.decode(blob)
        return blob

    @staticmethod
    def decode(blob: bytes) -> Request:
        return Request.from_parts(unpack(blob))

    @staticmethod
    def from_parts(parts: Iterable[bytes]) -> Request:
        """Return the request from the untrusted output of :func:`unpack`. Raises Refused only."""
        pairs: Pairs = []
        files: dict[str, FileData] = {}
        seen: set[str] = set()
        shell = None
        for part in parts:
            kind, (key, _, content) = part[:1], part[1:].partition(b"=")
            if kind == _SHELL:
                if shell is not None:
                    refuse("shell is given twice")
                shell = _text(content, "shell", MAX_VALUE)
                if not shell.isprintable():
                    refuse("shell has control characters")
                continue
            name = _key(key).decode("ascii")
            if name in seen:
                refuse(f"key {name} is given twice")
            seen.add(name)
            if kind == _FILE:
                files[name] = _file(content)
            else:
                pairs.append((name, _text(content, "a -vm value", MAX_VALUE)))
            if len(pairs) > MAX_PAIRS or len(files) > MAX_FILES:
                refuse(f"it has over {MAX_PAIRS} values or {MAX_FILES} files")
        return Request(tuple(pairs), files, shell)


# -- the user's side --------------------------------------------------------------------------


def parse_vm(values: Iterable[str]) -> Pairs | None:
    """Return the (key, value) pairs of these ``-vm`` values; None for ``-vm none`` (bare metal).

    A comma always separates pairs, so no value can contain a comma.
    """
    values = list(values)
    words = [word.strip() for value in values for word in value.split(",")]
    if BARE_METAL in words:
        if any(word != BARE_METAL for word in words):
            raise Refused(
                "-vm none cannot be combined with other -vm options: it requests no virtual machine"
            )
        return None
    pairs: Pairs = []
    for word in words:
        key, value = _split(word)
        if any(key == other for other, _ in pairs):
            shown = printable(key, 64)
            raise Refused("is given twice", key=shown, value=value, fix="write the key once")
        pairs.append((key, value))
    return pairs


def merge_pairs(command_line: Sequence[str], script: Sequence[str] = ()) -> Pairs | None:
    """Return the pairs of a job; the command line overrides the script. None is bare metal.

    ``-vm none`` overrides all pairs of the script, and any pair overrides ``none`` in the script.
    """
    given = parse_vm(command_line)
    written = parse_vm(script)
    if given is None or (written is None and not given):
        return None
    keys = {key for key, _ in given}
    return [pair for pair in written or [] if pair[0] not in keys] + given


def make_request(
    pairs: Iterable[tuple[str, str]],
    options: Mapping[str, Option[Any]],
    shell: str | None = None,
    cwd: Path | None = None,
) -> Request:
    """Return the request for these pairs after reading the files that they name. As the user."""
    refusals: list[Refusal] = []
    plain: Pairs = []
    files: dict[str, FileData] = {}
    for key, value in pairs:
        option = options.get(key)
        if option is None or not option.names_file(value):  # the policy refuses an unknown key
            plain.append((key, value))
        else:
            try:
                files[key] = read_user_file(value, cwd)
            except OSError as error:
                refusals.append(Refusal(f"cannot be read: {error.strerror}", key=key, value=value))
            except ValueError as error:
                refusals.append(Refusal(str(error), key=key, value=value))
    if refusals:
        raise Refused(*refusals)
    return Request(tuple(plain), files, shell)


def unknown_key(key: str, value: str, options: Iterable[str], note: str = "") -> Refusal:
    known = sorted(options)
    fix = hint(key, known, f"known keys: {', '.join(known)}")
    said = f"there is no -vm key with this name{note}"
    return Refusal(said, key=printable(key, 64), value=value, fix=fix)


def read_user_file(path: str, cwd: Path | None = None) -> FileData:
    """Read a file that the user names, as the user.

    Raises ValueError unless it is a regular file of at most MAX_FILE bytes.
    """
    try:
        full = (cwd or Path()) / Path(path).expanduser()
    except RuntimeError:
        raise ValueError("names the home of an unknown user") from None
    with open(full, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise ValueError(f"is longer than {MAX_FILE // 1024} KiB")
    return FileData(printable(full.name, MAX_FILE_NAME - 40), content)


def _open_at_once(path: str, flags: int) -> int:
    # Opening a FIFO without a writer would wait for ever, open(2).
    return os.open(path, flags | os.O_NONBLOCK)


def _split(word: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in word.partition("="))
    if not word:
        raise Refused("empty -vm pair: write key=value[,key=value...]")
    if not equals:
        raise Refused(
            f"-vm {printable(word, 80)} has no '='",
            fix="write key=value; a comma separates pairs, so a value cannot contain a comma",
        )
    if not key or not value:
        missing = "key" if not key else "value"
        raise Refused(f"-vm {printable(word, 80)} has no {missing}: write key=value")
    problem = _text_problem(value, MAX_VALUE) or _text_problem(key, MAX_VALUE)
    if problem:
        raise Refused(problem, key=printable(key, 64), value=value)
    return key, value


# -- the node's side: hostile input -----------------------------------------------------------


def read(blob: bytes) -> Request:
    """Return the request in an untrusted ``blob``.

    The caller is root; an unprivileged process parses the blob.
    """
    from vtorque_core.api.unprivileged_parser import Unreadable, parse_unprivileged  # noqa: PLC0415 - not by vsub

    _check_size(blob)
    try:
        return Request.from_parts(parse_unprivileged(unpack, blob))
    except Unreadable as error:
        raise Refused(str(error)) from None


def unpack(blob: bytes) -> Iterator[bytes]:
    r"""Yield the parts of a request: ``vKEY=VALUE``, ``fKEY=NAME\0CONTENT``, ``s=SHELL``.

    The caller validates the parts.
    """
    _check_size(blob)
    document = _object(_json(blob), "the document", ("v", "vm", "files", "shell"))
    version = document["v"]
    if type(version) is not int or version != VERSION:
        refuse(f"it is not of version {VERSION}: submit the job again")
    if not isinstance(document["vm"], list) or len(document["vm"]) > MAX_PAIRS:
        refuse(f"vm is not a list of at most {MAX_PAIRS}")
    for item in document["vm"]:
        if not isinstance(item, list) or len(item) != 2:
            refuse("a -vm pair is not a list of two")
        yield _VALUE + _key(item[0]) + b"=" + _bytes(item[1], "a -vm value")
    if not isinstance(document["files"], dict) or len(document["files"]) > MAX_FILES:
        refuse(f"files is not an object of at most {MAX_FILES}")
    for key, item in document["files"].items():
        entry = _object(item, "a file", ("name", "data"))
        try:
            content = b64decode(_bytes(entry["data"], "a file"), validate=True)
        except ValueError:
            refuse("a file is not base64")
        name = _bytes(entry["name"], "a file's name")
        if b"\0" in name:
            refuse("a file's name has a NUL character")
        yield _FILE + _key(key) + b"=" + name + b"\0" + content
    if document["shell"] is not None:
        yield _SHELL + b"=" + _bytes(document["shell"], "shell")


def _check_size(blob: bytes) -> None:
    if len(blob) > MAX_REQUEST:
        refuse(f"has {len(blob)} bytes (limit: {MAX_REQUEST})")


def _json(blob: bytes) -> Any:
    try:
        return json.loads(
            blob.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except UnicodeDecodeError:
        refuse("it is not UTF-8")
    except RecursionError:
        refuse("it is nested too deep")
    except ValueError as error:
        refuse(printable(str(error)))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a JSON object has a key twice")
    return found


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _object(value: Any, what: str, fields: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(fields):
        refuse(f"{what} is not an object with exactly {', '.join(fields)}")
    return value


def _bytes(value: Any, what: str) -> bytes:
    if not isinstance(value, str):
        refuse(f"{what} is not text")
    return value.encode("utf-8", "surrogatepass")  # invalid UTF-8: _text refuses it


def _text_problem(value: str, most: int) -> str | None:
    if len(value) > most:
        return f"has more than {most} characters"
    if "\0" in value:
        return "has a NUL character"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    return None


def _text(value: bytes, what: str, most: int) -> str:
    text = value.decode("utf-8", "surrogateescape")
    problem = _text_problem(text, most)
    if problem:
        refuse(f"{what} {problem}")
    return text


def _key(value: Any) -> bytes:
    key = value.encode("utf-8", "replace") if isinstance(value, str) else value
    if not isinstance(key, bytes) or not _KEY.fullmatch(key):
        refuse("a -vm key is not a short lower-case word")
    return key


def _file(part: bytes) -> FileData:
    name, _, content = part.partition(b"\0")
    text = _text(name, "a file's name", MAX_FILE_NAME)
    if not text.isprintable() or "/" in text:
        refuse("a file's name has a slash or control characters")
    if len(content) > MAX_FILE:
        refuse(f"a file has {len(content)} bytes (limit: {MAX_FILE})")
    return FileData(text, content)
