"""Read and validate the site config, ``/etc/vtorque/vtorque.toml``, and locate each value.

Errors are ConfigError with file, line and key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vtorque_core.api import hooks
from vtorque_core.base.distributions import how_to_get
from vtorque_core.base.errors import ConfigError, printable
from vtorque_core.base.names import CONFIG_PATH, Paths
from vtorque_core.base.trust import require_root_owned, require_secret
from vtorque_core.config import personal, schema
from vtorque_core.config.job_limits import OF_BATCH, Entry, parse_selectors
from vtorque_core.config.network_config import network_problems
from vtorque_core.config.option_limits import Limits, read_limits
from vtorque_core.config.plugins_table import plugin_problems, switch_problem
from vtorque_core.config.values import read_fields, unknown

if TYPE_CHECKING:
    from vtorque_core.api.values import Option
    from vtorque_core.config.plugins import Plugins

MAX_BYTES = 1 << 20  # a larger file is probably an image, given by mistake

S = TypeVar("S")


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


@dataclass(frozen=True)
class Site:
    """Validated site config. ``site[Settings]`` returns a plugin's settings.

    Attributes:
        options: limits of every registered ``-vm`` key.
        limits: the ``[[limits]]`` entries.
        settings: settings objects by plugin name.
    """

    raw: Raw = field(default_factory=lambda: Raw(CONFIG_PATH))
    batch: schema.Batch = field(default_factory=schema.Batch)
    node: schema.Node = field(default_factory=schema.Node)
    images: schema.Images = field(default_factory=schema.Images)
    kept: schema.KeptTable = field(default_factory=schema.KeptTable)
    log: schema.LogTable = field(default_factory=schema.LogTable)
    network: schema.Network = field(default_factory=schema.Network)
    networks: Mapping[str, schema.ExtraNetwork] = field(default_factory=dict)
    shares: Mapping[str, schema.ShareTable] = field(default_factory=lambda: schema.DEFAULT_SHARES)
    plugins: schema.PluginsTable = field(default_factory=schema.PluginsTable)
    options: Mapping[str, Limits] = field(default_factory=dict)
    limits: tuple[Entry, ...] = ()
    paths: Paths = field(default_factory=Paths)
    settings: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.raw.path

    @property
    def owner(self) -> int:
        """Uid that runs root's programs: 0, or the owner of a personal site."""
        return os.geteuid() if self.raw.personal else 0

    @property
    def templates(self) -> Path:
        return self.path.parent / "templates"

    def __getitem__(self, settings: type[S]) -> S:
        for value in self.settings.values():
            if type(value) is settings:
                return value
        raise KeyError(settings.__name__)

    def origin(self, key: str) -> str:
        return self.raw.origin(key)

    def place(self, key: str) -> str:
        table, _, name = key.rpartition(".")
        entry = ""
        if table.startswith("limits."):
            _, number, table = table.split(".", 2)
            entry = f"{self.limits[int(number) - 1]} "
        return f"{entry}[{table}] {name} in {self.path}"


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
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
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


def plugins_config(raw: Raw) -> schema.PluginsTable:
    return _only(raw, schema.PluginsTable, "plugins")


def build(raw: Raw, plugins: Plugins, *, node: bool = False) -> Site:
    """Return the validated site config. With ``node``, ``vtorque1.node`` modules must be loaded.

    Raises ConfigError with the first problem.
    """
    builder = _Builder(raw)
    site = builder.site(plugins, node)
    builder.raise_first()
    return site


def problems(raw: Raw, plugins: Plugins) -> list[str]:
    builder = _Builder(raw)
    builder.site(plugins, node=True)
    return builder.problems


def paths_of(raw: Raw) -> Paths:
    return _only(raw, Paths, "paths")


def _only(raw: Raw, cls: type[S], name: str) -> S:
    builder = _Builder(raw)
    table: S | None = builder.table(cls, name)
    builder.raise_first()
    return cls() if table is None else table


def node_of(raw: Raw) -> schema.Node:
    """Return only ``[node]``, or its defaults if it is invalid."""
    builder = _Builder(raw)
    table: schema.Node | None = builder.table(schema.Node, "node")
    return schema.Node() if table is None or builder.problems else table


class _Builder:
    plugins: Plugins
    wanted: schema.PluginsTable
    registered: Mapping[str, Option[Any]]

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

    def site(self, plugins: Plugins, node: bool) -> Site:
        self.unknown_tables()
        tables: dict[str, Any] = {
            name: (self.table(cls, name) if name in self.raw.data else None) or cls()
            for name, cls in schema.TABLES.items()
        }
        self.plugins, self.wanted = plugins, tables["plugins"]
        self.registered = plugins.options()
        system = tables["batch"].system
        for key, message in plugin_problems(self.wanted, plugins, system, self.raw.origin):
            self.problem("plugins", key, message)
        none = dict.fromkeys(self.registered, Limits())
        options = none | self.limits("options", self.raw.data.get("options", {}), none)
        return Site(
            raw=self.raw,
            **tables,
            networks=self.networks(tables["network"]),
            shares=self.shares(),
            options=options,
            limits=self.job_limits(system, options),
            settings=self.settings(node),
            warnings=tuple(self.warnings),
        )

    def unknown_tables(self) -> None:
        known = [*schema.TABLES, *schema.OTHER_TABLES]
        for name in self.raw.data:
            if name not in known:
                self.problem(name, "", unknown(name, known, "table"))

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

    def named(self, name: str, tables: Any = None) -> Iterator[str]:
        tables = self.raw.data.get(name, {}) if tables is None else tables
        if not isinstance(tables, Mapping):
            self.problem(name, "", f"must be tables [{name}.<name>]")
            return
        for key, value in tables.items():
            if isinstance(value, Mapping):
                yield key
            else:
                self.problem(name, key, f"must be a table [{name}.{printable(key, 40)}]")

    def networks(self, first: schema.Network) -> Mapping[str, schema.ExtraNetwork]:
        tables = {n: self.table(schema.ExtraNetwork, "networks", n) for n in self.named("networks")}
        found = {name: network for name, network in tables.items() if network is not None}
        for problem in network_problems(first, found, personal=self.raw.personal):
            self.problem(*problem)
        number = first.node_number
        return {n: replace(t, node_number=t.node_number or number) for n, t in found.items()}

    def shares(self) -> Mapping[str, schema.ShareTable]:
        if "shares" not in self.raw.data:
            return schema.DEFAULT_SHARES
        found = {
            name: self.table(schema.ShareTable, "shares", name) for name in self.named("shares")
        }
        for name, share in found.items():
            if share is None:
                continue
            if share.kind == "virtiofs" and not re.match(r"/|\{home\}", share.source):
                self.problem(f"shares.{name}", "source", "must be an absolute path or {home}")
            if share.kind == "nfs" and ":/" not in share.source:
                self.problem(f"shares.{name}", "source", "must be server:/export for kind = nfs")
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,30}", name):
                self.problem(f"shares.{name}", "", "name must be 1 to 30 letters, digits, _ or -")
        return {name: share for name, share in found.items() if share is not None}

    def limits(self, table: str, tables: Any, below: Mapping[str, Limits]) -> dict[str, Limits]:
        found = {}
        for key in self.named(table, tables):
            name = f"{table}.{key}"
            if key not in self.registered:
                self.unknown_option(name, key)
                continue
            option = self.registered[key]
            wrong: dict[str, str] = {}
            try:
                found[key], wrong = read_limits(option, tables[key], name, below[key])
            except Exception as error:  # a plugin's parse or show may raise anything
                wrong[""] = f"its plugin failed: {type(error).__name__}: {error}"
            for limit, message in wrong.items():
                self.problem(name, limit, message)
        return found

    def job_limits(self, system: str, below: Mapping[str, Limits]) -> tuple[Entry, ...]:
        tables = self.raw.data.get("limits", [])
        if not isinstance(tables, list) or not all(isinstance(each, Mapping) for each in tables):
            self.problem("limits", "", "must be tables [[limits]]")
            return ()
        return tuple(self.entry(n, table, system, below) for n, table in enumerate(tables, 1))

    def entry(
        self, number: int, table: Mapping[str, Any], system: str, below: Mapping[str, Limits]
    ) -> Entry:
        name, batch = f"limits.{number}", self.plugins.batch_systems().get(system)
        # A missing batch system is reported where it is needed.
        jobs, wrong = parse_selectors(table, batch.facts if batch else OF_BATCH, system)
        options, switches = table.get("options", {}), table.get("plugins", {})
        if not isinstance(switches, Mapping):
            wrong["plugins"], switches = "must be a table of plugins, each true or false", {}
        for key, message in wrong.items():
            self.problem(name, key, message)
        for key, on in switches.items():
            if message := switch_problem(key, on, self.plugins, system):
                self.problem(f"{name}.plugins", key, message)
        return Entry(number, jobs, self.limits(f"{name}.options", options, below), switches)

    def unknown_option(self, name: str, key: str) -> None:
        message = unknown(key, self.registered, "-vm key")
        # A disabled or broken plugin may define the key, which only its import would show.
        # Disabling a plugin must not make the config invalid on every node.
        wanted = self.wanted
        off = bool(self.plugins.broken or wanted.disable or wanted.enable is not None)
        if off and "did you mean" not in message:
            message = "no loaded plugin has that -vm key; ignored"
            self.warnings.append(self.line(name, "", message))
        else:
            self.problem(name, "", message)

    def settings(self, node: bool) -> dict[str, Any]:
        classes: dict[str, type[Any]] = {}
        broken = self.plugins.broken
        for found in self.plugins.each(hooks.vtorque_settings):
            if found.error is not None:
                broken.setdefault(found.plugin, found.message("vtorque_settings"))
            elif classes.setdefault(found.plugin, found.item) is not found.item:
                broken.setdefault(found.plugin, "vtorque_settings: more than one class")
        for name in self.named("plugin"):
            if name not in classes:
                self.unread_table(name, node)
        settings = {}
        for name, cls in classes.items():
            value = self.plugin_table(name, cls)
            if value is not None:
                settings[name] = value
                self.secrets(name, value)
        return settings

    def plugin_table(self, name: str, cls: type[Any]) -> Any:
        try:
            return self.table(cls, "plugin", name)
        except Exception as error:  # a plugin's annotations or checks may be anything
            self.problem(f"plugin.{name}", "", f"its settings class failed: {error}")
            return None

    def unread_table(self, name: str, node: bool) -> None:
        plugins, wanted = self.plugins, self.wanted
        if name in plugins.broken:
            return
        if name in plugins.distributions:
            if node and self.raw.data["plugin"][name]:
                dist = plugins.distributions[name]
                self.problem(f"plugin.{name}", "", f"the plugin has no settings ({dist})")
        elif name not in wanted.disable and (wanted.enable is None or name in wanted.enable):
            self.problem(
                f"plugin.{name}",
                "",
                f"plugin {printable(name, 40)} is not installed: "
                f"{how_to_get(name)}, or remove this table",
            )
        else:
            message = "is ignored: [plugins] does not enable it"
            self.warnings.append(self.line(f"plugin.{name}", "", message))

    def secrets(self, name: str, value: Any) -> None:
        if os.geteuid() != 0:
            return
        for f in fields(value):
            path = getattr(value, f.name)
            if f.metadata.get("secret_file") and path:
                try:
                    require_secret(Path(path))
                except ConfigError as error:
                    self.problem(f"plugin.{name}", f.name, str(error))


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
