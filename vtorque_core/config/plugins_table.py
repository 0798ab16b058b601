"""Check plugin names in ``[plugins]`` and ``[[limits]]``, and require the batch system's plugin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from vtorque_core.api import hooks
from vtorque_core.base.distributions import PLUGINS, how_to_get
from vtorque_core.base.errors import printable
from vtorque_core.base.suggest import hint
from vtorque_core.config.plugins import BUILTIN, Plugins
from vtorque_core.config.schema import PluginsTable


def plugin_problems(
    wanted: PluginsTable, plugins: Plugins, system: str, origin: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """Yield (key of ``[plugins]``, problem). ``origin`` returns where a key is set.

    ``disable`` may name plugins of vTorque that are not installed, so that hosts can share a
    config.
    """
    installed = {*plugins.distributions, *plugins.off}
    for name in wanted.disable:
        if name == BUILTIN:
            yield "disable", f"has {name!r}, which is vTorque itself and always on: remove it"
        elif name not in installed and name not in PLUGINS:
            yield "disable", _no_such(name, installed, "nothing is disabled; remove it")
    for name in wanted.enable or ():
        if name in installed or name in wanted.disable:
            continue
        if name in PLUGINS:
            yield "enable", f"plugin {name} is not installed: {how_to_get(name)}"
        else:
            yield "enable", _no_such(name, installed, f"{how_to_get(name)}, or remove it")
    # A broken plugin may define it; this is reported where the batch system is used.
    if not plugins.off or plugins.broken or system in (found := plugins.batch_systems()):
        return
    where = origin("batch.system")
    if where != "default" or not set(plugins.off).isdisjoint(wanted.disable):
        yield (
            "disable" if wanted.disable else "enable",
            f"leaves no plugin that provides [batch] system = {printable(system, 40)!r} ({where}); "
            f"disabled: {', '.join(plugins.off)}; batch systems of enabled plugins: "
            f"{', '.join(sorted(found)) or 'none'}: leave its plugin on or choose another system",
        )


def switch_problem(name: str, on: object, plugins: Plugins, system: str) -> str:
    if not isinstance(on, bool):
        return f"is {printable(repr(on), 40)}, but must be true or false"
    if name == BUILTIN:
        return "is vTorque itself and always on: remove it"
    installed = {*plugins.distributions, *plugins.off}
    if name not in installed and name not in PLUGINS:
        return f"there is no such plugin; {hint(name, {*installed, *PLUGINS}, 'remove it')}"
    if on and name in plugins.off:
        return "is disabled for all jobs in [plugins]: enable it there to disable it for some"
    bring = (each for each in plugins.each(hooks.vtorque_batch_systems) if each.error is None)
    if name in (each.plugin for each in bring if each.item.name == system):
        return f"provides [batch] system = {printable(system, 40)!r}, which every job needs"
    return ""


def _no_such(name: str, installed: Collection[str], otherwise: str) -> str:
    shown = repr(printable(name, 40))
    meant = hint(name, {*installed, *PLUGINS}, otherwise)
    return f"has {shown}, but there is no such plugin: {meant}"
