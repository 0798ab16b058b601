"""Types of the items that plugins may return from each hook, checked at run time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING
from typing import Any, get_args

from vtorque_core.api import strategies, values
from vtorque_core.base.errors import Refusal

_DECLARED: dict[str, tuple[type[Any], ...]] = {
    "vtorque_settings": (object,),
    "vtorque_guest_types": (strategies.GuestType,),
    "vtorque_batch_systems": (strategies.BatchSystem,),
    "vtorque_image_builders": (strategies.ImageBuilder,),
    "vtorque_image_sources": (strategies.ImageSource,),
    "vtorque_commands": (strategies.Command,),
    "vtorque_options": (values.Option,),
    "vtorque_parse_args": (Refusal,),
    "vtorque_needs": (values.Extra,),
    "vtorque_beside_script": (list, tuple),  # a str is a Sequence, but no command
    "vtorque_after_script": (list, tuple),
}
_ACTING = {  # imported when needed: the teardown needs vtorque_resources only
    "vtorque_reserved_items": "vtorque_core.api.claims:PoolClaim",
    "vtorque_boot_sources": "vtorque_core.api.boot_source:BootSource",
    "vtorque_remote_command": "click:Command",
    "vtorque_guest_context": "vtorque_core.api.guest_context:ContextItem",
    "vtorque_health_checks": "vtorque_core.api.health:HealthCheck",
    "vtorque_kept_records": "vtorque_core.api.kept_records:Place",
    "vtorque_jobs_on_nodes": "vtorque_core.api.batch_system:JobOnNode",
    "vtorque_render_domain": "vtorque_core.api.libvirt_domain:Element",
    "vtorque_rendered_sources": "vtorque_core.api.boot_source:Offer",
    "vtorque_resources": "vtorque_core.api.acquired:Resource",
    "vtorque_setup_steps": "vtorque_core.api.setup_steps:SetupStep",
}
_CLASSES = frozenset({"vtorque_settings", "vtorque_resources"})  # their items are classes


def item_types(hook: str) -> tuple[type[Any], ...]:
    """Return the allowed types of a hook's items; empty for a hook without result."""
    if hook == "vtorque_plan":
        from vtorque_core.api import claims  # noqa: PLC0415 - root only

        return (*get_args(claims.Claim), Refusal, claims.Notice)
    if hook in _ACTING:
        return (strategies.import_object(_ACTING[hook]),)
    return _DECLARED.get(hook, ())


def problem(hook: str, item: object) -> str:
    types = item_types(hook)
    belongs = _names(types)
    if hook in _CLASSES:
        right = isinstance(item, type) and issubclass(item, types)
        belongs = "a class" if types == (object,) else f"a class derived from {types[0].__name__}"
    else:
        right = isinstance(item, types)
    if right:
        return _check_item(item, types)
    given = f"the class {item.__name__}" if isinstance(item, type) else type(item).__name__
    return f"returned {given} instead of {belongs}"


def _check_item(item: object, types: tuple[type[Any], ...]) -> str:
    if isinstance(item, values.Option):
        return "" if item.help else f"the option {item.key} has no help"
    fields = getattr(item, "__dataclass_fields__", {}) if types == (object,) else {}
    bare = [
        name for name, field in fields.items()
        if not field.metadata.get("doc") and field.default_factory is MISSING  # else: a table
    ]  # fmt: skip
    return f"the setting {bare[0]} has no doc" if bare else ""


def _names(types: Iterable[type[Any]]) -> str:
    names = [each.__name__ for each in types]
    article = "an" if names and names[0][0] in "AEIOU" else "a"
    return f"{article} {' or '.join(names)}" if names else "nothing"
