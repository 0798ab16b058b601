"""doc/security.md and its appendix: each boundary names tests that exist, each attack is listed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import grimp

import hostile_requests
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import problems
from vtorque_core.config.site_file import parse_toml
from vtorque_core.resources.kinds import CORE_KINDS

REPO = Path(__file__).resolve().parents[3]
PAGE = (REPO / "doc/security.md").read_text(encoding="utf-8")
APPENDIX = (REPO / "doc/generated/security-tests.md").read_text(encoding="utf-8")
LISTED = tomllib.loads((REPO / "tests/security.toml").read_text(encoding="utf-8"))


def load(name: str) -> ModuleType:
    where = Path(__file__).parents[1] / name
    spec = importlib.util.spec_from_file_location(f"page_{where.stem}", where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(title: str) -> str:
    """Return the text below a heading, up to the next of its level."""
    mark = title.split(" ", 1)[0]
    return re.split(rf"^{mark} ", PAGE.split(f"\n{title}\n")[1], flags=re.MULTILINE)[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def exists(named: str) -> bool:
    """Return whether a test of this node ID exists, or a file."""
    file, *inner = named.split("::")
    if not inner:
        return (REPO / file).is_file()
    *classes, test = inner
    path = REPO / file
    text = path.read_text() if path.is_file() else ""
    wanted = [rf"^class {each}\b" for each in classes] + [rf"^{'    ' * len(classes)}def {test}\("]
    return all(re.search(each, text, re.MULTILINE) for each in wanted)


def test_each_boundary_and_section_names_existing_tests():
    boundaries = [row[0] for row in rows("### Boundaries")]
    assert [*LISTED["boundaries"]] == boundaries
    headings = {*re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
    assert {*LISTED["sections"]} <= headings
    tests = [test for part in LISTED.values() for each in part.values() for test in each]
    assert len(set(tests)) > 130
    assert [test for test in tests if not exists(test)] == []
    assert not exists("tests/unit/repository/test_security_page.py::test_that_is_not_there")


def test_size_of_the_root_code_matches_the_page():
    graph = grimp.build_graph("vtorque_core", cache_dir=None)
    tops = ("vtorque_core.node.start", "vtorque_core.node.end")
    roots = {module for module in graph.modules if module.startswith(tops)}
    roots |= {f"vtorque_core.{place.partition(':')[0]}" for place in CORE_KINDS.values()}
    for top in tuple(roots):
        roots |= graph.find_upstream_modules(top)

    def lines(modules: set[str]) -> int:
        paths = (REPO / module.replace(".", "/") for module in modules)
        files = (p / "__init__.py" if p.is_dir() else p.with_suffix(".py") for p in paths)
        return sum(len(file.read_text().splitlines()) for file in files)

    said = re.search(
        r"([0-9]+) of the core's ([0-9]+) modules, ([0-9,]+) of its ([0-9,]+) lines",
        " ".join(section("## Root's part of the core").split()),
    )
    assert said is not None
    modules, whole, of_root, of_all = (int(word.replace(",", "")) for word in said.groups())
    assert (modules, whole) == (len(roots), len(graph.modules))
    assert abs(of_root - lines(roots)) < 500
    assert abs(of_all - lines(graph.modules)) < 500


def test_size_of_a_prologue_matches_the_page():
    words = " ".join(PAGE.split())
    said = re.search(r"loads \[([0-9]+) modules\]\S+ ([0-9,]+) lines of code", words)
    assert said is not None
    argv = [sys.executable, "-I", str(REPO / "tests/support/root_modules.py")]
    names = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    layout = load("repository/test_layout.py")
    found = [importlib.util.find_spec(name) for name in names]
    lines = sum(layout.code_lines(Path(spec.origin)) for spec in found if spec and spec.origin)
    assert int(said[1]) == len(names)
    assert abs(int(said[2].replace(",", "")) - lines) < 500


def test_appendix_has_every_attack():
    channels = load("config/test_hostile_channels.py")
    by_root = load("base/test_path_attacks.py")
    by_user = load("resources/test_path_attacks_users.py")
    requests = [*hostile_requests.BLOBS, *hostile_requests.TOKENS]
    requests += [*channels.TORQUE, *channels.SCRIPTS]
    assert len(requests) + len(hostile_requests.PAIRS) >= 149
    paths = [*by_root.ATTACKS, *by_root.BY_OTHERS, *by_user.ALL]
    assert len(paths) >= 61
    assert [name for name in (*requests, *paths) if name not in APPENDIX] == []
    counted = [int(n) for n in re.findall(r"^\| [^|]+ \| (\d+) \|", APPENDIX, re.MULTILINE)]
    assert sum(counted) == len(requests) + len(hostile_requests.PAIRS) + len(paths)


def test_each_actor_has_a_boundary():
    """The names of actors are those in the table's column of attackers."""
    attackers = " ".join(row[1] for row in rows("### Boundaries"))
    for actor in ("user", "root in the guest", "neighbor", "stolen", "caller", "another user"):
        assert actor in attackers


def test_no_setting_allows_images_of_users():
    """Similar settings are errors. The plugin own-images refuses such images on a site."""
    plugins = Plugins.load(node=False)
    keys = (("images", "allow_user_images"), ("images", "user_images"), ("options.img", "users"))
    for table, key in keys:
        raw = parse_toml(f"[{table}]\n{key} = true\n".encode(), Path("/etc/x.toml"))
        assert any(key in str(each) for each in problems(raw, plugins))
    assert any(key == "img" and "/" in value for key, value in hostile_requests.PAIRS)
