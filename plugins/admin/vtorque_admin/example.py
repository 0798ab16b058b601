"""Generate the output of ``vtorque config example`` and ``vtorque config show`` from the schema."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from vtorque_admin.toml_value import show_toml
from vtorque_core.api import Option, hooks
from vtorque_core.live.site_config import (
    Limits,
    Plugins,
    Site,
    effective_default,
    is_required,
    schema,
    show_limits,
)

_HEAD = """\
# vTorque's site config. Only root may write this file. Users can read it: for a secret, write the
# path of a file that only root can read. Every key is shown with its default; remove the '#' in
# front of a key to change it. Sizes are text like "512M" or "2G", a plain number is MiB.
# Durations are text like "500ms", "90s" or "5m", a plain number is seconds.
"""

_JOB_LIMITS = """\
# [[limits]] apply to some jobs and override [options]; if several match, the last one wins.
# Selectors: queue, partition, account, qos, group or user, each a name, a glob or a list of them.
# Settings: [limits.options.<key>], as [options.<key>]; [limits.plugins], each true or false.
"""
_NETWORKS = {"hpc": schema.ExtraNetwork("br-hpc", subnet="10.186.0.0/16")}


def example(plugins: Plugins) -> str:
    """Return a commented config with every key, its default, unit and meaning."""
    parts = [_HEAD]
    for name, cls in schema.TABLES.items():
        parts.append(_table(name, _first_line(cls), _keys(cls)))
    for name, network in _NETWORKS.items():
        keys = _keys(schema.ExtraNetwork, _values(network))
        parts.append(
            _table(f"networks.{name}", _first_line(schema.ExtraNetwork), keys, hidden=True)
        )
    for name, share in schema.DEFAULT_SHARES.items():
        intro = "A host directory in every guest; any [shares.<name>] replaces this default."
        keys = _keys(schema.ShareTable, _values(share))
        parts.append(_table(f"shares.{name}", intro, keys, hidden=True))
    limits = "".join(f"#   {name}: {doc}\n" for name, doc in schema.LIMIT_KEYS.items())
    parts.append(f"# [options.<key>] limits what users may request with -vm key=value:\n{limits}")
    for option in plugins.options().values():
        parts.append(_table(f"options.{option.key}", option.help, _option_keys(option)))
    parts.append(_JOB_LIMITS)
    for name, cls in settings_classes(plugins).items():
        parts.append(_table(f"plugin.{name}", plugins.distributions[name], _keys(cls)))
    return "\n".join(parts)


def settings_classes(plugins: Plugins) -> dict[str, type[Any]]:
    """Return the settings class of each plugin that has one."""
    found = plugins.each(hooks.vtorque_settings)
    return {c.plugin: c.item for c in found if c.error is None and c.item is not None}


@dataclasses.dataclass(frozen=True)
class EffectiveValue:
    """A value in effect and where it is set."""

    value: Any
    origin: str
    unit: str | None = None

    @property
    def text(self) -> str:
        """The value as TOML."""
        return "(absent)" if self.value is None else show_toml(self.value, self.unit)


def effective_values(site: Site, plugins: Plugins) -> dict[str, EffectiveValue]:
    """Return every value in effect, by its dotted key."""
    tables: list[tuple[str, Any]] = [(name, getattr(site, name)) for name in schema.TABLES]
    tables += [(f"networks.{name}", network) for name, network in site.networks.items()]
    tables += [(f"shares.{name}", share) for name, share in site.shares.items()]
    tables += [(f"plugin.{name}", value) for name, value in site.settings.items()]
    found: dict[str, EffectiveValue] = {}
    for table, settings in tables:
        for f in dataclasses.fields(settings):
            key = f"{table}.{f.name}"
            value = _json(getattr(settings, f.name))
            found[key] = EffectiveValue(value, site.origin(key), f.metadata.get("unit"))
    for number, table in enumerate(site.raw.data.get("limits", ()), 1):
        key = f"limits.{number}"
        found[key] = EffectiveValue(_json(table), f"{site.path}:{site.raw.line(key)}")
    for name, option in plugins.options().items():
        limits = site.options.get(name, Limits())
        default = effective_default(option, limits)
        text = option.show(default) if default not in (None, "") else ""
        for limit, value in ({"default": text} | show_limits(option, limits)).items():
            key = f"options.{name}.{limit}"
            found[key] = EffectiveValue(value, site.origin(key))
    return found


def _json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_json(item) for item in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def _table(name: str, intro: str, keys: Iterable[tuple[str, str]], hidden: bool = False) -> str:
    lines = [f"# {intro}", f"{'#' if hidden else ''}[{name}]"]
    for doc, assignment in keys:
        lines += [f"# {doc}", assignment] if doc else [assignment]
    return "\n".join(lines) + "\n"


def _values(settings: Any) -> dict[str, Any]:
    return {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}


def _first_line(cls: type[Any]) -> str:
    text = (cls.__doc__ or "").split("\n", maxsplit=1)[0].partition(": ")[2]
    return text[:1].upper() + text[1:]


def _keys(cls: type[Any], values: Mapping[str, Any] | None = None) -> Iterator[tuple[str, str]]:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        doc, unit = str(f.metadata.get("doc", f.name)), f.metadata.get("unit")
        if get_origin(hints[f.name]) is Literal:
            doc += f" ({' | '.join(str(a) for a in get_args(hints[f.name]))})"
        if unit:
            doc += f" (unit: {unit})"
        if f.metadata.get("secret_file"):
            doc += " (a file that only root may read)"
        if values is not None:
            yield doc, f"#{f.name} = {show_toml(values[f.name], unit)}"
        elif is_required(f):
            yield doc + " (must be set)", f"{f.name} = {_empty_value(hints[f.name])}"
        else:
            yield from _show_default(f, doc, unit)


def _show_default(
    f: dataclasses.Field[Any], doc: str, unit: str | None
) -> Iterator[tuple[str, str]]:
    made = f.default_factory
    default = f.default if made is dataclasses.MISSING else made()
    if default is None:
        yield doc, f"# {f.name} = ..."
    else:
        yield doc, f"#{f.name} = {show_toml(default, unit)}"


def _option_keys(option: Option[Any]) -> Iterator[tuple[str, str]]:
    shown = "" if option.default in (None, "") else option.show(option.default)
    if not option.is_file or option.words:
        yield "", f"#default = {show_toml(shown)}" if shown else '# default = "..."'
    if isinstance(option.default, int | float) and not isinstance(option.default, bool):
        yield "", '# min = "..."'
        yield "", '# max = "..."'
    yield "", "# allow = [...]"
    yield "", "#deny = []"


def _empty_value(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return show_toml(get_args(kind)[0])
    if origin is tuple:
        return "[]"
    if origin is not None:
        return "{}" if isinstance(origin, type) and issubclass(origin, Mapping) else '""'
    return {bool: "false", int: "0", float: "0.0", Path: '"/"'}.get(kind, '""')
