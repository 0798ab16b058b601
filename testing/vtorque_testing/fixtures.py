"""Fixtures for the tests of plugins: what pytest finds as soon as vtorque-testing is installed.

None needs root, libvirt's daemon or a configured node. Each is a function to call; what it makes is
in ``tmp_path``, and gone with the test. What they import is imported when they are used.
"""

from __future__ import annotations

import importlib.util
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

pytest.register_assert_rewrite(
    "vtorque_testing.batch",
    "vtorque_testing.batch_node",
    "vtorque_testing.batch_request",
    "vtorque_testing.batch_submission",
    "vtorque_testing.builder",
    "vtorque_testing.exporter",
    "vtorque_testing.guest",
    "vtorque_testing.live",
    "vtorque_testing.sink",
)

if TYPE_CHECKING:
    from vtorque_core.api.guest_plan import GuestPlan
    from vtorque_core.api.libvirt_domain import Element
    from vtorque_core.site.plugins import Plugins
    from vtorque_testing.planned import PlannedNode
    from vtorque_testing.recorded import RecordedJob, RecordedNode


def pytest_configure(config: pytest.Config) -> None:
    """Make known the mark that some of the contracts' tests have."""
    config.addinivalue_line("markers", "full: long: leave it out with -m 'not full'")


@pytest.fixture
def vtorque_guest() -> Callable[..., GuestPlan]:
    """Return what makes a guest's plan: ``vtorque_guest(vcpus=4, ...)``, fields of GuestPlan.

    Without any it is the only guest, of 1 vCPU and 512 MiB, of a job that asked for nothing.
    """
    from vtorque_testing.planned import guest_plan  # noqa: PLC0415

    return guest_plan


@pytest.fixture
def vtorque_plugin(tmp_path: Path) -> Iterator[Callable[..., Plugins]]:
    """Return what registers a plugin: ``vtorque_plugin(module, ..., name="acme", only=())``.

    A module may be source text, too: it is written to a file and imported. The core's options and
    the plugins of ``only`` that are installed are there beside it; ``only=None``: all that are.
    Raises what an import or a registration raises, as a node would report it.
    """
    from vtorque_testing.recorded import load  # noqa: PLC0415

    made: list[str] = []

    def register(
        *modules: ModuleType | str, name: str = "acme", only: tuple[str, ...] | None = ()
    ) -> Plugins:
        plugins = load(only)
        if name in plugins.names:
            plugins.unregister(name)
        for module in modules:
            if isinstance(module, str):
                made.append(f"vtorque_source_{name.replace('-', '_')}_{len(made)}")
                found = _from_text(tmp_path / f"{made[-1]}.py", module)
            else:
                found = module
            plugins.register(name, found, f"vtorque-{name} 1.0.0")
        return plugins

    yield register
    for each in made:
        sys.modules.pop(each, None)


@pytest.fixture
def vtorque_node(tmp_path: Path) -> Callable[..., RecordedNode]:
    """Return what makes a recorded node: ``vtorque_node("gpu", plugins, config="[node] ...")``.

    The machine is a name of :data:`vtorque_testing.planned.MACHINES`; the plugins are by default
    all that are installed; ``config`` is the site's, TOML. More arguments are those of
    :meth:`vtorque_testing.recorded.RecordedNode.make`: ``tools``, ``sysfs``, ``share``.
    """
    from vtorque_testing import recorded  # noqa: PLC0415
    from vtorque_testing.planned import MACHINES  # noqa: PLC0415
    from vtorque_testing.sysfs_tree import tree  # noqa: PLC0415

    made: list[RecordedNode] = []

    def make(
        machine: str = "smt", plugins: Plugins | None = None, *, config: str = "", **more: Any
    ) -> RecordedNode:
        known = MACHINES[machine]
        if known.sysfs:
            more.setdefault("sysfs", lambda top: tree(known.sysfs, top))
        top = tmp_path / f"node{len(made) or ''}"
        tables = tomllib.loads(config)
        of = recorded.load() if plugins is None else plugins
        made.append(recorded.RecordedNode.make(top, known.text, of, tables=tables, **more))
        return made[-1]

    return make


@pytest.fixture
def vtorque_domain() -> Callable[..., ElementTree.Element]:
    """Return what renders a domain: ``vtorque_domain(guest, *elements)``, or ``(guest, node)``.

    ``node`` is a PlannedNode, whose plugins say what hardware the guest has. The XML is checked
    against libvirt's schema, for which xmllint(1) must be installed. Returns its root element.
    """
    from vtorque_testing import planned  # noqa: PLC0415

    def render(guest: GuestPlan, *given: Element | PlannedNode, **spec: Any) -> ElementTree.Element:
        nodes = [each for each in given if isinstance(each, planned.PlannedNode)]
        elements = [each for each in given if not isinstance(each, planned.PlannedNode)]
        text = nodes[0].domain(guest, **spec) if nodes else planned.domain(guest, elements, **spec)
        planned.check_schema(text)
        return ElementTree.fromstring(text)  # noqa: S314 - our own

    return render


@pytest.fixture
def vtorque_job() -> Iterator[Callable[..., RecordedJob]]:
    """Return what makes a job of a recorded node: ``vtorque_job(node, acme="2", vcpus="1")``.

    ``start()`` and ``release()`` are its life, ``survive()`` kills its start at every step of it,
    releases, and looks whether all is as before. When the test ends no process of it may be left.
    """
    from vtorque_testing.faults import orphans  # noqa: PLC0415
    from vtorque_testing.recorded import RecordedJob  # noqa: PLC0415

    with orphans() as processes:

        def make(node: RecordedNode, pairs: Mapping[str, str] = {}, **more: str) -> RecordedJob:
            return RecordedJob(node, node.job({**pairs, **more}), processes)

        yield make
        assert not processes(), "processes of the job are left"


def _from_text(path: Path, text: str) -> ModuleType:
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
