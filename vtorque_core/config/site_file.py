"""Read the file of the site config, locate its values, and check single tables.

A job's end reads only the tables ``[paths]`` and ``[node]``.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from vtorque_core.base.errors import ConfigError, printable
from vtorque_core.base.names import CONFIG_PATH, Paths, absolute
from vtorque_core.base.safefs import name_errors
from vtorque_core.base.settings import setting
from vtorque_core.base.trust import require_root_owned
from vtorque_core.config import personal
from vtorque_core.config.values import read_fields

MAX_BYTES = 1 << 20  # a larger file is probably an image, given by mistake

S = TypeVar("S")


def at_least(least: int) -> Callable[[int], None]:
    def check(value: int) -> None:
        if value < least:
            raise ValueError(f"is {value}: the minimum is {least}")

    return check


@dataclass(frozen=True)
class Node:
    """``[node]``: how guests run on a node."""

    name: str = setting("", "this node's name in the batch system; empty: the host name")
    libvirt_uri: str = setting("qemu:///system", "libvirt connection")
    accel: Literal["auto", "kvm", "tcg"] = setting(
        "auto", "auto: KVM if a probe guest runs, else emulation; kvm: only KVM; tcg: emulation"
    )
    start_timeout: float = setting(300.0, "limit for the start of all guests", "s")
    teardown_timeout: float = setting(60.0, "limit of a job's whole teardown", "s")
    release_timeout: float = setting(30.0, "limit of releasing one resource", "s")
    grace: float = setting(10.0, "time from SIGTERM to SIGKILL for the job's script", "s")
    qemu_user: str = setting(
        "libvirt-qemu", "QEMU's group; also its user if guests have no uid of their own"
    )
    guest_uids: int = setting(
        2146900000,
        "first of 1000 uids: each guest's QEMU runs with its own; 0: with qemu_user",
        check=at_least(0),
    )
    qemu_overhead: int = setting(
        256, "memory for QEMU itself, per guest, in addition to the guest's RAM", "MiB"
    )
    host_reserve_cores: int = setting(0, "CPUs reserved for the host", None, at_least(0))
    host_reserve_ram: int = setting(0, "memory reserved for the host", "MiB")
    numa: Literal["preferred", "strict", "none"] = setting(
        "preferred", "memory from the NUMA node of a guest's CPUs; strict: refuse other memory"
    )
    exclusive: bool = setting(
        True,
        "a job without granted CPU ids does not share its node with VM jobs of other "
        "users: it waits until they end",
    )
    subordinate_ids: int = setting(
        2147000000,
        "uid in shares of root in guests: this number plus the user's uid; 0: as in /etc/subuid",
        check=at_least(0),
    )
    uefi: Path = setting(
        Path("/usr/share/OVMF/OVMF_CODE_4M.fd"),
        "UEFI firmware of x86 guests whose image has the label firmware=efi",
        check=absolute,
    )
    allow_qemu_args: bool = setting(False, "let plugins add raw QEMU arguments")


@dataclass(frozen=True)
class Raw:
    """The parsed file before validation.

    If the file does not exist, ``data`` is empty or has only the defaults of a ``personal`` site.
    """

    path: Path
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    personal: bool = False

    def line(self, key: str) -> int | None:
        return line_of(self.text, key)

    def origin(self, key: str) -> str:
        """Return where a dotted key is set: ``"default"`` or ``"file:line"``."""
        value: Any = self.data
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return "default"
            value = value[part]
        line = self.line(key)
        if line is None and self.personal:
            return "default"
        return f"{self.path}:{line}" if line else str(self.path)


def read_toml(path: Path = CONFIG_PATH, *, new: bool = False) -> Raw:
    """Read and parse the file. As root, refuse a file that others can change.

    CONFIG_PATH may be missing; any other file must exist unless ``new``.
    """
    if personal.is_personal_path(path):
        personal.require_own_directories()
        return _apply_defaults(_read(personal.config(), True), personal.defaults())
    return _read(path, new or path == CONFIG_PATH)


def _apply_defaults(raw: Raw, defaults: Mapping[str, Mapping[str, Any]]) -> Raw:
    data = dict(raw.data)
    for name, table in defaults.items():
        own = data.get(name, {})
        data[name] = {**table, **own} if isinstance(own, Mapping) else own
    return replace(raw, data=data, personal=True)


def _read(path: Path, may_be_missing: bool) -> Raw:
    # Test for existence before the check: a file that appears later in a directory like /tmp is not
    # read, and a file that was root's at the check cannot be replaced later.
    if may_be_missing and not os.path.lexists(path):
        return Raw(path)
    if os.geteuid() == 0:
        require_root_owned(path)
    with name_errors(path, fault=ConfigError), path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    return parse_toml(content, path)


def parse_toml(content: bytes, path: Path = CONFIG_PATH) -> Raw:
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: is longer than {MAX_BYTES} bytes")
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
        return Raw(path, text, tomllib.loads(text))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        found = re.search(r" \(at line ([0-9]+), column [0-9]+\)", str(error))
        place = f"{path}:{found[1]}" if found else f"{path}"
        raise ConfigError(f"{place}: is not TOML: {printable(str(error))}") from None


def only_table(raw: Raw, cls: type[S], name: str) -> S:
    builder = Tables(raw)
    table: S | None = builder.table(cls, name)
    builder.raise_first()
    return cls() if table is None else table


def load_paths(path: Path) -> Paths:
    return only_table(read_toml(path), Paths, "paths")


def load_for_teardown(path: Path) -> tuple[Paths, Node]:
    """Return ``[paths]``, and ``[node]`` or its defaults if it is invalid. Ignore other tables.

    Raises ConfigError if the file or ``[paths]`` is invalid.
    """
    raw = read_toml(path)
    return only_table(raw, Paths, "paths"), Tables(raw).table(Node, "node") or Node()


class Tables:
    """Tables of the file, with the problems found in them."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def raise_first(self) -> None:
        if self.problems:
            more = len(self.problems) - 1
            others = f" (and {more} more: vtorque config check)" if more else ""
            raise ConfigError(self.problems[0] + others)

    def line(self, table: str, key: str, message: str) -> str:
        line = self.raw.line(f"{table}.{key}" if key else table)
        place = f"{self.raw.path}:{line}" if line else str(self.raw.path)
        where = f"[{printable(table, 80)}]"
        if entry := re.fullmatch(r"limits\.([0-9]+)(?:\.(.*))?", table):  # not a TOML name
            where = f"[[limits]] {entry[1]}" + (f" [{printable(entry[2], 80)}]" if entry[2] else "")
        return f"{place}: {where} {printable(key, 80)}".rstrip() + f": {message}"

    def problem(self, table: str, key: str, message: str) -> None:
        self.problems.append(self.line(table, key, message))

    def table(self, cls: type[Any], *names: str) -> Any:
        data: Any = self.raw.data
        for name in names:
            data = data.get(name, {})
        where = ".".join(names)
        if not isinstance(data, Mapping):
            self.problem(where, "", "must be a table")
            return None
        values, wrong = read_fields(cls, data)
        for key, message in wrong.items():
            self.problem(where, key, message)
        try:
            return None if wrong else cls(**values)
        except (TypeError, ValueError) as error:
            self.problem(where, "", printable(str(error)))
            return None


_ENDS = ("]", '"""', "'''")  # of values in several lines


def line_of(text: str, key: str) -> int | None:
    """Return the line (from 1) of a dotted key such as ``options.ram.max``.

    If the text lacks the key, return the line of the innermost table for the key; None: no table.
    ``limits.1`` is the first table of the list ``limits``.
    """
    lines = _lines(text)
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((lines[each] for each in above if each in lines), None)


def _lines(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    arrays: dict[str, int] = {}  # number of tables so far, by name
    table, statement, first = "", "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        goes_on, statement = bool(statement), f"{statement}{line}\n"
        if goes_on and not any(end in line for end in _ENDS):
            continue
        try:
            keys = list(_keys(tomllib.loads(statement)))
        except tomllib.TOMLDecodeError:
            continue  # the statement continues in the next line
        if statement.lstrip().startswith("["):
            if statement.lstrip().startswith("[["):
                arrays[keys[-1]] = arrays.get(keys[-1], 0) + 1
            keys += [_array_key(key, arrays) for key in keys]
            table = f"{keys[-1]}."
        else:
            keys = [table + key for key in keys]
        for key in keys:
            found.setdefault(key, first)
        statement, first = "", number + 1
    return found


def _array_key(key: str, arrays: Mapping[str, int]) -> str:
    of = next((name for name in arrays if f"{key}.".startswith(f"{name}.")), None)
    return key if of is None else f"{of}.{arrays[of]}{key.removeprefix(of)}"


def _keys(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield above + key
        if isinstance(value, Mapping):
            yield from _keys(value, f"{above}{key}.")
