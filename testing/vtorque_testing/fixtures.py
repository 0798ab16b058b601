"""Pytest fixtures for plugin tests, available wherever vtorque-testing is installed.

None of them needs root, libvirtd or a configured node. Each fixture is a factory function that
creates its files in ``tmp_path``.
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
    from vtorque_core.config.plugins import Plugins
    from vtorque_testing.planned import PlannedNode
    from vtorque_testing.recorded import RecordedJob, RecordedNode


def pytest_configure(config: pytest.Config) -> None:
    """Register the pytest marker ``full``, which some tests of the contracts have."""
    config.addinivalue_line("markers", "full: long: leave it out with -m 'not full'")


@pytest.fixture
def vtorque_guest() -> Callable[..., GuestPlan]:
    """Return a factory of guest plans: ``vtorque_guest(vcpus=4, ...)``.

    The arguments are fields of GuestPlan. By default, the guest is the only one of a job
    without options, with 1 vCPU and 512 MiB.
    """
    from vtorque_testing.planned import guest_plan  # noqa: PLC0415

    return guest_plan


@pytest.fixture
def vtorque_plugin(tmp_path: Path) -> Iterator[Callable[..., Plugins]]:
    """Return a function that registers a plugin: ``vtorque_plugin(module, ...)``.

    A module may also be source text, which is written to a file and imported. ``name="acme"`` sets
    the plugin's name. ``only`` has the names of installed plugins to load as well; ``only=None``
    loads all. Errors of an import or a registration are those that a node would report.
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
                found = _parse_toml(tmp_path / f"{made[-1]}.py", module)
            else:
                found = module
            plugins.register(name, found, f"vtorque-{name} 1.0.0")
        return plugins

    yield register
    for each in made:
        sys.modules.pop(each, None)


@pytest.fixture
def vtorque_node(tmp_path: Path) -> Callable[..., RecordedNode]:
    """Return a factory of recorded nodes: ``vtorque_node("gpu", plugins, config="[node] ...")``.

    ``"gpu"`` is a key of :data:`vtorque_testing.planned.MACHINES`. By default, all installed
    plugins are used. ``config`` is the site config, in TOML. Further arguments are those of
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
    """Return a function that renders a guest's domain XML and returns its root element.

    ``vtorque_domain(guest, *elements)`` renders these elements. ``vtorque_domain(guest, node)``
    renders the hardware that the plugins of a PlannedNode provide. Both calls validate the XML
    against libvirt's schema, which requires xmllint(1).
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
    """Return a factory of jobs on a recorded node: ``vtorque_job(node, acme="2", vcpus="1")``.

    The keyword arguments are ``-vm`` keys. The job's method ``survive()`` kills the start before
    and after the ``create()`` of each resource, releases the job, and checks that nothing is left.
    The test fails if a process of the job still runs at the end of the test.
    """
    from vtorque_testing.faults import orphans  # noqa: PLC0415
    from vtorque_testing.recorded import RecordedJob  # noqa: PLC0415

    with orphans() as processes:

        def make(node: RecordedNode, pairs: Mapping[str, str] = {}, **more: str) -> RecordedJob:
            return RecordedJob(node, node.job({**pairs, **more}), processes)

        yield make
        assert not processes(), "processes of the job are left"


def _parse_toml(path: Path, text: str) -> ModuleType:
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
