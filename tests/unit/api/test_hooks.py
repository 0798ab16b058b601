"""Every hook is documented, and the example in its docstring runs."""

import inspect
import re
import textwrap
import types

import pytest

from vtorque_core.api import hooks
from vtorque_core.config.plugins import Plugins

HOOKS = [name for name in vars(hooks) if name.startswith("vtorque_")]


class Anything:
    """Stands for any argument of a hook: has every attribute, item and key."""

    guests = ()
    id = owner = name = "x"
    rank = 1

    def __getitem__(self, key):
        return 9 if key.key == "acme_min" else key.default


def example(name):
    doc = inspect.getdoc(getattr(hooks, name))
    return textwrap.dedent(doc.split("Example::", 1)[1])


@pytest.mark.parametrize("name", HOOKS)
def test_docstring_example_runs(name):
    module = types.ModuleType("example")
    module.__dict__["__name__"] = __name__
    exec(compile(example(name), name, "exec"), module.__dict__)  # noqa: S102 - our own docstring
    plugins = Plugins()
    plugins.register("example", module, "vtorque-example 1.0")
    arguments = inspect.signature(getattr(hooks, name)).parameters
    found = list(plugins.each(getattr(hooks, name), **{a: Anything() for a in arguments}))
    assert found
    assert [c.error for c in found] == [None] * len(found)
    if "None" not in str(inspect.signature(getattr(hooks, name)).return_annotation):
        assert all(c.item is not None for c in found)


def test_docstring_has_module_time_of_call_and_effect_of_an_error():
    for name in HOOKS:
        doc = inspect.getdoc(getattr(hooks, name))
        group = r"(``vtorque1``|``vtorque1\.node``|either)"
        fields = rf"Entry-point group: {group}\.\nCalled: .+?\.\nErrors: .+?\.\n\nExample"
        assert re.search(fields, doc, re.DOTALL), name


def test_hooks_are_in_life_cycle_order():
    phases = [
        "vtorque_options",
        "vtorque_plan",
        "vtorque_guest_context",
        "vtorque_render_domain",
        "vtorque_pre_boot",
        "vtorque_post_boot",
        "vtorque_teardown",
    ]
    assert [h for h in HOOKS if h in phases] == phases
