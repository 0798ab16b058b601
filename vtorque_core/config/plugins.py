"""Find, load and call plugins. A broken plugin is reported and does not stop the others.

Entry point groups: ``vtorque1``, and ``vtorque1.node`` for modules that act on nodes as root. The
digit is the major version of the API.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import linecache
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import importlib_metadata
import pluggy
from importlib_metadata import Distribution, EntryPoint

from vtorque_core.api import hooks
from vtorque_core.base.distributions import BATCH_SYSTEMS, how_to_get
from vtorque_core.base.errors import Conflict, Refusal, Refused, VtorqueError, plugin_text
from vtorque_core.config import hook_items

if TYPE_CHECKING:
    from vtorque_core.api.strategies import BatchSystem, GuestType, ImageBuilder, ImageSource
    from vtorque_core.api.values import Option

GROUP = "vtorque1"
NODE_GROUP = "vtorque1.node"
BUILTIN = "core"
PREFIX = "vtorque_"  # of every hook: vtorque_core/api/hooks.py
_TRACE = "VTORQUE_TRACE"
_costs: dict[str, float] = {}  # CPU seconds of a plugin's first import in this process

P = ParamSpec("P")
T = TypeVar("T")


class PluginError(VtorqueError):
    """An unexpected exception of a hook. The message names plugin and hook."""


@dataclass(frozen=True)
class Contribution(Generic[T]):
    """One item of a plugin's hook, or the hook's exception and the line that raised it."""

    plugin: str
    distribution: str
    item: T
    error: BaseException | None = None
    where: str = ""

    @property
    def origin(self) -> str:
        return f"plugin {self.plugin} ({self.distribution})"

    def message(self, hook: str) -> str:
        at = f" ({self.where})" if self.where else ""
        return f"{hook}: {type(self.error).__name__}: {self.error}{at}"

    def failure(self, hook: str) -> Refusal:
        before = f"{self.origin} failed in {hook}: {type(self.error).__name__}: "
        return Refusal(plugin_text(self.error, before))


def entry_points(*groups: str) -> list[EntryPoint]:
    """Return the entry points of these groups in the order of ``sys.path``.

    Skips unreadable distributions, for which importlib.metadata.entry_points() fails.
    """
    return list(_entry_points(groups, tuple(sys.path)))


@functools.cache
def _entry_points(groups: tuple[str, ...], _path: tuple[str, ...]) -> list[EntryPoint]:
    found: dict[str, list[EntryPoint]] = {}
    for distribution in importlib_metadata.distributions():
        with contextlib.suppress(Exception):
            points = [point for point in distribution.entry_points if point.group in groups]
            if points:  # of two distributions with one name (PEP 503) the first counts
                name = _name_version(distribution).split()[0]
                found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), points)
    return [point for points in found.values() for point in points]


def owner(point: EntryPoint) -> str:
    return _name_version(point.dist) if point.dist else point.module


@functools.cache
def _name_version(distribution: Distribution) -> str:
    # Distribution.metadata imports the email package, which takes 20 ms in each command.
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    found = dict(re.findall(r"^(Name|Version): (\S+)", text.partition("\n\n")[0], re.MULTILINE))
    return f"{found['Name']} {found['Version']}"


def installed_plugins() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(GROUP, NODE_GROUP), key=lambda p: (p.group != GROUP, p.name)):
        found.setdefault(point.name, []).append(point)
    return dict(sorted(found.items()))


def points_of(group: str, loaded: Collection[str]) -> tuple[EntryPoint, ...]:
    brought: dict[str, set[str]] = {}
    for name, points in installed_plugins().items():
        for point in points:
            brought.setdefault(owner(point), set()).add(name)

    def is_wanted(point: EntryPoint) -> bool:
        plugins = brought.get(owner(point))
        return plugins is None or not plugins.isdisjoint(loaded)

    return tuple(filter(is_wanted, entry_points(group)))


def import_point(point: EntryPoint, known: dict[Path, Path] | None = None) -> Any:
    if os.geteuid() == 0:
        require_trusted(point, known)
    return point.load()


def require_trusted(point: EntryPoint, known: dict[Path, Path] | None = None) -> None:
    from vtorque_core.base.trust import require_root_owned  # noqa: PLC0415 - root's processes only

    package, *below = point.module.split(".")
    # Level by level: find_spec() of a dotted name imports, that is executes, the packages above.
    found = find_spec(package)
    while found is not None:
        above = found.submodule_search_locations or ()  # of a package without __init__.py
        for place in [str(found.origin)] if found.has_location else above:
            require_root_owned(Path(place), known=known)
        if not below or found.submodule_search_locations is None:
            return
        name = f"{found.name}.{below.pop(0)}"
        found = PathFinder.find_spec(name, found.submodule_search_locations)


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name.startswith(PREFIX) else None


class Plugins:
    """The loaded plugins of a process.

    Attributes:
        broken: import errors by plugin name.
        costs: CPU seconds of the import of each ``vtorque1`` module.
        off: installed plugins that the site disables.
        withheld: plugins that are disabled for this job, with the setting that disables each.
    """

    def __init__(self) -> None:
        self.broken: dict[str, str] = {}
        self.costs: dict[str, float] = {}
        self.off: list[str] = []
        self.withheld: Mapping[str, str] = {}
        self.distributions: dict[str, str] = {}
        self._modules: dict[int, tuple[str, Any]] = {}  # id to plugin and module, in order
        self._checked: dict[Path, Path] = {}  # checked directories, only root can write
        self._manager = _Manager("vtorque")
        self._manager.add_hookspecs(hooks)

    @classmethod
    def load(
        cls,
        *,
        node: bool | Collection[str],
        enable: Collection[str] | None = None,
        disable: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> Plugins:
        """Import and register plugins. As root, load only plugins that no other user can write.

        If ``node`` is True, also load all ``vtorque1.node`` modules; if it has plugins' names, only
        those plugins' modules. ``only`` overrides ``enable`` and ``disable``.
        """
        self = cls()
        self.register(
            BUILTIN, importlib.import_module("vtorque_core.api.vm_options"), "vtorque-core"
        )
        for name, points in installed_plugins().items():
            if _is_enabled(name, enable, disable, only):
                self._load_one(name, points, node if isinstance(node, bool) else name in node)
            else:
                self.off.append(name)
        return self

    def _load_one(self, name: str, points: Sequence[EntryPoint], node: bool) -> None:
        self.distributions[name] = owner(points[0])
        owners = {owner(point) for point in points}
        if len(owners) > 1 or len({point.group for point in points}) < len(points):
            self.broken[name] = f"two distributions provide it: {', '.join(sorted(owners))}"
            return
        try:
            for point in points:
                if point.group == GROUP or node:
                    before = time.process_time()
                    module = import_point(point, self._checked)
                    if point.group == GROUP:
                        self.costs[name] = _costs.setdefault(name, time.process_time() - before)
                    self.register(name, module, owner(point))
        except (Exception, SystemExit) as error:
            self.unregister(name)
            self.broken[name] = f"{type(error).__name__}: {error}"

    def register(self, name: str, module: object, distribution: str) -> None:
        """Register one module of a plugin.

        Raises PluginError for an unknown hook, or for a hook without ``@hookimpl``.
        """
        unknown = [hook for hook in _hook_names(module) if not hasattr(hooks, hook)]
        if unknown:
            raise PluginError(
                f"plugin {name} ({distribution}): {unknown[0]} is not a hook of vTorque"
            )
        if forgotten := _find_unmarked(module):
            raise PluginError(
                f"plugin {name} ({distribution}): {forgotten} has no @hookimpl, so it would "
                f"never be called: add @hookimpl, or rename it without {PREFIX}"
            )
        self._manager.register(module, f"{name}:{id(module)}")
        self._modules[id(module)] = name, module
        self.distributions[name] = distribution

    def unregister(self, name: str) -> None:
        for module in self.modules_of(name):
            self._manager.unregister(module)
            del self._modules[id(module)]

    def withhold(self, withheld: Mapping[str, str]) -> Plugins:
        """Return a view of the plugins for a job, in which ``withheld`` plugins are disabled.

        Acquire the job's resources only with this view. Teardown loads only its plugins.
        """
        view = copy.copy(self)
        view.withheld = dict(withheld)
        return view

    def only_plugin(self, name: str) -> Plugins:
        others = {other: "" for other in self.names if other != name}
        return self.withhold({**self.withheld, **others})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded plugins, the core first, without disabled plugins."""
        found = {name for name, _ in self._modules.values()} - self.withheld.keys()
        return tuple(sorted(found, key=_order))

    def modules_of(self, name: str) -> list[Any]:
        return [module for owner, module in self._modules.values() if owner == name]

    def hooks_of(self, name: str) -> tuple[str, ...]:
        return tuple(sorted({h for module in self.modules_of(name) for h in _hook_names(module)}))

    def each(
        self, hook: Callable[P, Iterable[T] | None], *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[Contribution[T]]:
        """Call a hook of each plugin, in the order of ``names``, and yield every item or error.

        A hook without result yields one contribution with the item None. An item of a wrong type is
        an error, and the plugin's further items are skipped.
        """
        if args:
            raise TypeError("call a hook with keyword arguments only")
        caller = getattr(self._manager.hook, hook.__name__)
        for impl in sorted(
            caller.get_hookimpls(), key=lambda i: _order(self._modules[id(i.plugin)][0])
        ):
            name, _ = self._modules[id(impl.plugin)]
            if name in self.withheld:
                continue
            dist = self.distributions[name]
            items: list[Any] = []
            error: BaseException | None = None
            began = time.perf_counter()
            try:
                result = impl.function(*(kwargs[arg] for arg in impl.argnames))
                items.extend(_items(hook.__name__, result))
            except (Exception, SystemExit) as raised:
                error = raised
            if os.environ.get(_TRACE):
                given = {arg: kwargs[arg] for arg in impl.argnames}
                _trace(hook.__name__, name, given, items, error, time.perf_counter() - began)
            yield from (Contribution(name, dist, item) for item in items)
            if error is not None:
                where = _show_location(impl.plugin, hook.__name__)
                yield Contribution[Any](name, dist, None, error, where)

    def collect(
        self, hook: Callable[P, Iterable[T] | None], *args: P.args, **kwargs: P.kwargs
    ) -> list[Contribution[T]]:
        """Call a hook of each plugin, as :meth:`each` does, and return all contributions.

        Raises the plugin's VtorqueError; for any other exception of the plugin, PluginError.
        """
        found = []
        for contribution in self.each(hook, *args, **kwargs):
            if contribution.error is not None:
                raise_error(contribution, hook.__name__)
            found.append(contribution)
        return found

    def collect_from_one(
        self, hook: Callable[P, Iterable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Return the items of a hook. Raises Conflict if more than one plugin provides items."""
        found = self.collect(hook, *args, **kwargs)
        owners = sorted({each.distribution for each in found})
        if len(owners) > 1:
            raise Conflict(
                f"{hook.__name__}: {owners[0]} and {owners[1]} both provide items: disable "
                "one of them in [plugins]"
            )
        return [each.item for each in found]

    # -- strategies by name -------------------------------------------------------------------

    def options(self) -> dict[str, Option[Any]]:
        return self._unique(hooks.vtorque_options, lambda o: o.key)

    def guest_types(self) -> dict[str, GuestType]:
        return self._unique(hooks.vtorque_guest_types, lambda g: g.name)

    def batch_systems(self) -> dict[str, BatchSystem]:
        return self._unique(hooks.vtorque_batch_systems, lambda b: b.name)

    def image_builders(self) -> dict[str, ImageBuilder]:
        return self._unique(hooks.vtorque_image_builders, lambda b: b.name)

    def image_sources(self) -> list[ImageSource]:
        return list(self._unique(hooks.vtorque_image_sources, lambda _: "images of users").values())

    def guest_type(self, name: str) -> GuestType:
        why = self.why_withheld(hooks.vtorque_guest_types, name)
        return _find_one(self.guest_types(), name, "guest type", self.broken, why and f"; {why}")

    def batch_system(self, name: str) -> BatchSystem:
        how = f": {how_to_get(BATCH_SYSTEMS[name])}" if name in BATCH_SYSTEMS else ""
        return _find_one(self.batch_systems(), name, "batch system", self.broken, how)

    def plugin_of_guest_type(self, name: str) -> str:
        for contribution in self.each(hooks.vtorque_guest_types):
            if contribution.error is None and contribution.item.name == name:
                return contribution.plugin
        raise KeyError(name)

    def why_withheld(self, hook: Callable[[], Iterable[Any]], name: str) -> str:
        """Return why the plugin that defines ``name`` is disabled for this job; empty: enabled."""
        for each in self.withhold({}).each(hook) if self.withheld else ():
            named = getattr(each.item, "key", None) or getattr(each.item, "name", None)
            if named == name and each.plugin in self.withheld:
                where = self.withheld[each.plugin]
                return f"plugin {each.plugin} is disabled for this job (set by {where})"
        return ""

    def _unique(self, hook: Callable[[], Iterable[T]], key: Callable[[T], str]) -> dict[str, Any]:
        found: dict[str, Contribution[Any]] = {}
        for contribution in self.each(hook):
            if contribution.error is not None:
                self.broken.setdefault(contribution.plugin, contribution.message(hook.__name__))
                continue
            name = key(contribution.item)
            if name in found:
                raise Conflict(
                    f"{hook.__name__}: {name!r} is provided by {found[name].distribution} and by "
                    f"{contribution.distribution}: disable one of them in [plugins]"
                )
            found[name] = contribution
        return {name: c.item for name, c in found.items()}


def _items(hook: str, result: Any) -> Iterator[Any]:
    if result is None and not hook_items.item_types(hook):
        yield None  # an action
        return
    for item in [None] if result is None else result:
        if problem := hook_items.problem(hook, item):
            raise TypeError(problem)
        yield item


def raise_error(contribution: Contribution[Any], hook: str) -> None:
    error = contribution.error
    if isinstance(error, VtorqueError):
        raise error
    raise PluginError(f"{contribution.origin} failed in {contribution.message(hook)}") from error


def _find_one(
    found: Mapping[str, T], name: str, what: str, broken: Mapping[str, str], advice: str = ""
) -> T:
    if name in found:
        return found[name]
    known = ", ".join(sorted(found)) or "none"
    hint = "".join(f"; plugin {n} could not be loaded: {e}" for n, e in sorted(broken.items()))
    raise Refused(
        f"no installed plugin provides the {what} {name!r} (available: {known}){advice}{hint}"
    )


def _is_enabled(
    name: str,
    enable: Collection[str] | None,
    disable: Collection[str],
    only: Collection[str] | None,
) -> bool:
    if only is not None:
        return name in only
    return name not in disable and (enable is None or name in enable)


def _order(name: str) -> tuple[bool, str]:
    return (name != BUILTIN, name)


def _find_unmarked(module: object) -> str:
    """Return the location of a function with a hook's name but no ``@hookimpl``; empty: none."""
    if not isinstance(module, ModuleType):
        return ""
    for name, found in vars(module).items():
        if not name.startswith(PREFIX) or not isinstance(found, FunctionType):
            continue
        if not hasattr(found, "vtorque_impl") and found.__module__ == module.__name__:
            return f"{module.__name__}.{name} (line {found.__code__.co_firstlineno})"
    return ""


def _show_location(module: object, name: str) -> str:
    file, called = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not file:
        return ""
    begins = re.compile(rf"(def |class )?{re.escape(name)}\b")
    for number, line in enumerate(linecache.getlines(file), start=1):
        if begins.match(line):
            return f"{called}, line {number}"
    return called


def _hook_names(module: object) -> list[str]:
    names = vars(module) if isinstance(module, ModuleType) else dir(module)
    return [n for n in names if getattr(getattr(module, n, None), "vtorque_impl", None)]


_SHOWN = (str, int, float, bytes, bool, Path, type(None))
_LONGEST = 400  # characters of a result: all of an ordinary claim or element


def _trace(
    hook: str,
    plugin: str,
    arguments: Mapping[str, Any],
    results: Sequence[Any],
    error: BaseException | None,
    seconds: float,
) -> None:
    given = ", ".join(f"{name}={_short(value)}" for name, value in arguments.items())
    lines = [f"vtorque: {plugin}: {hook}({given}) {seconds * 1e3:.1f} ms"]
    lines += [f"  -> {_cut(repr(each))}" for each in results if each is not None]
    if error is not None:
        lines.append(f"  raised {type(error).__name__}: {_cut(str(error))}")
    sys.stderr.write("\n".join(lines) + "\n")


def _short(value: Any) -> str:
    if isinstance(value, _SHOWN):
        return _cut(repr(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    named = next((getattr(value, n) for n in ("name", "id", "path") if hasattr(value, n)), "")
    return f"{type(value).__name__}({named})"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
