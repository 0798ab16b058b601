"""Validate the user's cloud-config and convert it to context items.

An unprivileged process parses the YAML, and this module checks the parsed values. The guest applies
``write_files`` and ``runcmd`` as the user.
"""

from __future__ import annotations

import functools
import re
import shlex
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NoReturn

from vtorque_core.api import FileData, Refusal, Refused
from vtorque_core.api.guest_context import ContextItem, GuestFile, Package, RootCommand
from vtorque_core.api.guest_plan import JobUser
from vtorque_core.api.unprivileged_parser import Unreadable, parse_unprivileged
from vtorque_linux_guest.guest.contract import AS_USER, SITE
from vtorque_linux_guest.guest.linux_family import DEBIAN, REDHAT

MODULES = ("packages", "write_files", "runcmd")
MAX_EVENTS = 10_000  # of YAML: scalars, starts and ends of collections
MAX_DEPTH = 6
MAX_ITEMS = 200  # of each list

# apt-get removes a package if "-" follows its name; dnf also accepts files and groups.
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.+_:-]{0,98}[A-Za-z0-9+])?(?<!\.rpm)", re.ASCII)
_MODE = re.compile(r"0?[0-7]{3}", re.ASCII)
_FILE_KEYS = {"path", "content", "encoding", "permissions", "append", "defer"}
_ENCODINGS = {"text/plain": False, "b64": True, "base64": True}
_PATH = "/usr/local/bin:/usr/bin:/bin"
_P, _W, _A, _S, _C = b"p", b"w", b"a", b"s", b"c"  # package, file (new, longer), shell, command


@dataclass(frozen=True)
class UserFile:
    """A file to write. ``mode`` has the permission bits; ``append`` extends an existing file."""

    path: str
    content: bytes
    mode: int
    append: bool


@dataclass(frozen=True)
class UserConfig:
    """A validated cloud-config. A command is a string for the shell or a tuple of words."""

    packages: tuple[str, ...] = ()
    files: tuple[UserFile, ...] = ()
    commands: tuple[str | tuple[str, ...], ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the :data:`MODULES` that this configuration uses."""
        used = zip(MODULES, (self.packages, self.files, self.commands), strict=True)
        return tuple(name for name, items in used if items)


@functools.lru_cache(maxsize=2)  # called for each guest of the job
def read(file: FileData) -> UserConfig:
    """Parse a user's cloud-config. Raises Refused with the reason."""
    try:
        return _parse_answer(parse_unprivileged(parse, file.content))
    except Unreadable as error:
        _refuse(str(error))


def items(
    config: UserConfig, allowed: Iterable[str], kin: str | None, user: JobUser, home: str
) -> Iterator[ContextItem]:
    """Yield the context items that apply a user's configuration.

    ``allowed`` are the modules that the site allows, ``kin`` is the image's family, and ``home`` is
    a path in the guest. Raises Refused.
    """
    allowed = [name for name in MODULES if name in allowed]
    for name in config.modules:
        if name not in allowed:
            limit = ", ".join(allowed) or "none"
            _refuse(f"{name} is not allowed here", limit=limit)
    if kin not in {DEBIAN, REDHAT}:
        fix = "choose an image of a Debian or RedHat family (vmgr images list)"
        _refuse("the image does not support cloud-config files of users", fix=fix)
    for package in config.packages:
        yield Package(package, "debian" if kin == DEBIAN else "redhat")
    if not config.files and not config.commands:
        return
    lines = ["set -eu", "umask 022", f"cd {shlex.quote(home)}", *_FUNCTIONS]
    for number, file in enumerate(config.files):
        if not PurePosixPath(file.path).is_relative_to(home) or file.path == home:
            _refuse(f"write_files: {file.path} is not below your home", limit=home)
        path = f"{SITE}/cloud-config/{number:03d}"
        yield GuestFile(path, file.content, 0o400, "job")
        put = "append" if file.append else "write"
        lines.append(f"{put} {path} {shlex.quote(file.path)} {file.mode:04o}")
    for command in config.commands:
        text = command if isinstance(command, str) else shlex.join(command)
        lines.append(f"eval {shlex.quote(text)}")
    script = f"{SITE}/cloud-config/run"
    text = "\n".join(lines) + "\n"
    yield GuestFile(script, text.encode(), 0o500, "job")
    yield GuestFile(AS_USER, _user_command(user, home, script).encode(), 0o700)
    yield RootCommand(("/bin/sh", AS_USER))


_FUNCTIONS = (
    'write() { mkdir -p "${2%/*}"; cat "$1" >"$2"; chmod "$3" "$2"; }',
    'append() { mkdir -p "${2%/*}"; cat "$1" >>"$2"; chmod "$3" "$2"; }',
)


def _user_command(user: JobUser, home: str, script: str) -> str:
    who = ("setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--init-groups", "--")
    environ = {"HOME": home, "USER": user.name, "LOGNAME": user.name, "PATH": _PATH}
    words = (*who, "env", "-i", *(f"{k}={v}" for k, v in environ.items()), "/bin/sh", script)
    return f"exec {shlex.join(words)}\n"


def _parse_answer(parts: Iterable[bytes]) -> UserConfig:
    packages: list[str] = []
    files: list[UserFile] = []
    commands: list[str | tuple[str, ...]] = []
    for part in parts:
        kind, rest = part[:1], part[1:]
        if kind == _P:
            name = _text(rest)
            if not _PACKAGE.fullmatch(name):
                _refuse(f"packages: {name!r} is not a valid package name")
            packages.append(name)
        elif kind in (_W, _A):
            path, mode, content = (*rest.split(b"\0", 2), b"", b"")[:3]
            files.append(UserFile(_path(path), content, _mode(mode), kind == _A))
        elif kind == _S:
            commands.append(_text(rest))
        else:
            commands.append(tuple(_text(word) for word in rest.split(b"\0")))
    return UserConfig(tuple(packages), tuple(files), tuple(commands))


def _path(value: bytes) -> str:
    path = _text(value)
    if not path.startswith("/") or ".." in path.split("/") or not path.isprintable():
        _refuse(f"write_files: {path!r} is not an absolute path without '..'")
    return str(PurePosixPath(path))


def _mode(value: bytes) -> int:
    mode = _text(value)
    if not _MODE.fullmatch(mode):
        _refuse(f"write_files: permissions {mode!r} are invalid: write them like '0644'")
    return int(mode, 8)


def _text(value: bytes) -> str:
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        _refuse("contains text that is not UTF-8")
    if "\0" in text:
        _refuse("contains a NUL character")
    return text


def _refuse(said: str, **more: str) -> NoReturn:
    raise Refused(Refusal(f"your cloud-config: {said}", **more))


# -- in an unprivileged process ---------------------------------------------------------------


def parse(content: bytes) -> Iterator[bytes]:
    """Yield one byte string for each package, file and command of a cloud-config.

    Privileges: nobody. Raises ValueError with the reason.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8") from None
    if text.split("\n", 1)[0].rstrip() != "#cloud-config":
        hint = ", but with a byte order mark" if text.startswith("\ufeff") else ""
        raise ValueError(f"does not begin with #cloud-config{hint}")
    document = _document(text)
    if not isinstance(document, dict):
        raise ValueError("is not a YAML mapping of modules")
    for name, found in document.items():
        if name not in MODULES:
            raise ValueError(f"{name}: users may only use {', '.join(MODULES)}")
        if not isinstance(found, list) or len(found) > MAX_ITEMS:
            raise ValueError(f"{name} is not a list of at most {MAX_ITEMS} items")
    for package in document.get("packages", ()):
        yield _P + _word(package, "packages")
    for file in document.get("write_files", ()):
        yield _file(file)
    for command in document.get("runcmd", ()):
        if isinstance(command, list):
            if not command:
                raise ValueError("runcmd: a command is empty")
            yield _C + b"\0".join(_word(word, "runcmd") for word in command)
        else:
            yield _S + _word(command, "runcmd")


def _document(text: str) -> Any:
    """Return the YAML document. Reject aliases, tags and duplicate keys."""
    import yaml  # noqa: PLC0415 - 30 ms that few jobs need

    try:
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            begins = isinstance(event, yaml.CollectionStartEvent)
            depth += begins - isinstance(event, yaml.CollectionEndEvent)
            if count > MAX_EVENTS or depth > MAX_DEPTH:
                raise ValueError("is too long or nested too deeply")
            if getattr(event, "anchor", None) is not None:
                raise ValueError(
                    f"{_line_text(event.start_mark)}: anchors and aliases are not allowed"
                )
            if getattr(event, "tag", None) is not None:
                raise ValueError(f"{_line_text(event.start_mark)}: tags are not allowed")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_duplicate_keys(node)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"{_line_text(mark)}: " if mark else ""
        raise ValueError(f"{position}{getattr(error, 'problem', None) or error}") from None


def _refuse_duplicate_keys(node: Any) -> None:
    if node is None or isinstance(node.value, str):
        return
    seen = set()
    for each in node.value:
        if not isinstance(each, tuple):
            _refuse_duplicate_keys(each)
            continue
        key, value = each
        if not isinstance(key.value, str) or key.value in seen:
            raise ValueError(f"{_line_text(key.start_mark)}: a key is duplicate or not a string")
        seen.add(key.value)
        _refuse_duplicate_keys(value)


def _line_text(mark: Any) -> str:
    return f"line {mark.line + 1}"


def _word(value: object, where: str) -> bytes:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{where}: {value!r} is not a string: put it in quotes")
    return value.encode("utf-8", "surrogatepass")


def _file(file: object) -> bytes:
    if not isinstance(file, Mapping) or not {"path", "content"} <= set(file) <= _FILE_KEYS:
        keys = ", ".join(sorted(_FILE_KEYS))
        raise ValueError(
            f"write_files: an item lacks path or content, or has a key other than {keys}"
        )
    encoded = _ENCODINGS.get(str(file.get("encoding", "text/plain")))
    if encoded is None:
        raise ValueError(f"write_files: encoding must be one of {', '.join(_ENCODINGS)}")
    content = _word(file["content"], "write_files: content")
    if encoded:
        content = b64decode(b"".join(content.split()), validate=True)
    mode = _word(file.get("permissions", "0644"), "write_files: permissions")
    words = (_word(file["path"], "write_files: path"), mode)
    return (_A if file.get("append") is True else _W) + b"\0".join((*words, content))
