"""Validate the site config, ``/etc/vtorque/vtorque.toml``.

Errors are ConfigError with file, line and key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vtorque_core.api import hooks
from vtorque_core.base.distributions import how_to_get
from vtorque_core.base.errors import ConfigError, printable
from vtorque_core.base.names import CONFIG_PATH, Paths
from vtorque_core.base.trust import require_secret
from vtorque_core.config import schema
from vtorque_core.config.job_limits import OF_BATCH, Entry, parse_selectors
from vtorque_core.config.network_config import network_problems
from vtorque_core.config.option_limits import Limits, read_limits
from vtorque_core.config.plugins_table import plugin_problems, switch_problem
from vtorque_core.config.site_file import Node, Raw, Tables, only_table
from vtorque_core.config.values import unknown

if TYPE_CHECKING:
    from vtorque_core.api.values import Option
    from vtorque_core.config.plugins import Plugins

S = TypeVar("S")


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
    node: Node = field(default_factory=Node)
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


def plugins_config(raw: Raw) -> schema.PluginsTable:
    return only_table(raw, schema.PluginsTable, "plugins")


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


class _Builder(Tables):
    plugins: Plugins
    wanted: schema.PluginsTable
    registered: Mapping[str, Option[Any]]

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
