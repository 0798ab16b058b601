"""Pages that name files and modules (CONTRIBUTING.md, READMEs, doc/design.md) are right."""

import ast
import functools
import re
import runpy
from pathlib import Path

from tracked_files import tracked

REPO = Path(__file__).resolve().parents[3]
NOT_LISTED = {"README.md", "__init__.py", "py.typed"}
UPDATE = runpy.run_path(str(REPO / "scripts/update-docs"))


# -- Files written by scripts/update-docs ----------------------------------------------------------


def test_generated_pages_are_up_to_date():
    """If it fails, run scripts/update-docs."""
    made = UPDATE["pages"]()
    assert not [str(page) for page, text in made.items() if page.read_text() != text]
    assert set(REPO.glob("vtorque_core/**/README.md")) <= set(made)


def test_map_lists_every_core_package_and_module_once():
    table = UPDATE["MODULES"].read_text().partition(UPDATE["PACKAGES"])[2]
    rows = re.findall(r"^\| \d+ \| \[`([\w/]+)`\].* \| ([^|]*) \|$", table, re.MULTILINE)
    listed = [f"{package}/{name}.py" for package, names in rows for name in names.split()]
    named = [name.replace("`", "") for name in listed if "__init__" not in name]
    core = REPO / "vtorque_core"
    inner = [path for path in core.rglob("*.py") if path.parent != core]
    there = {str(p.relative_to(core)) for p in inner if p.name != "__init__.py"}
    assert sorted(named) == sorted(there)
    packages = sorted(str(p.parent.relative_to(core)) for p in core.glob("*/**/__init__.py"))
    assert sorted(package for package, _ in rows) == packages


def test_first_line_of_every_core_module_is_one_line():
    silent = []
    for path in REPO.glob("vtorque_core/**/*.py"):
        said = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
        if not said or said[1:2] not in ([], [""]):
            silent.append(str(path.relative_to(REPO)))
    assert not silent


# -- READMEs inside packages -------------------------------------------------------------------


def files_below(folder):
    """Yield a folder's files, and those of subfolders without a README."""
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__" and not (path / "README.md").exists():
            yield from files_below(path)
        elif path.is_file() and path.name not in NOT_LISTED:
            yield path


def listed_in(page):
    """Return the paths in the first column of a README's table; ``.py`` may be left out."""
    cells = re.findall(r"^\| (.*?) \|", page.read_text(), re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    paths = [page.parent / name for name in names]
    return [path if path.exists() else path.with_name(f"{path.name}.py") for path in paths]


def test_package_readme_lists_exactly_its_files():
    """A folder in a table stands for its contents. Of the core only modules are listed."""
    pages = [
        *REPO.glob("vtorque_core/**/README.md"),
        *REPO.glob("plugins/*/vtorque_*/**/README.md"),
    ]
    wrong = []
    for page in pages:
        listed = listed_in(page)
        ours = page.is_relative_to(REPO / "vtorque_core")
        there = [p for p in files_below(page.parent) if p.suffix == ".py" or not ours]
        lacking = [p for p in there if not any(p.is_relative_to(one) for one in listed)]
        wrong += [f"{page} lacks {path.name}" for path in lacking]
        wrong += [f"{page} has {path.name}" for path in listed if not path.exists()]
        wrong += [
            f"{page} repeats {path.name}" for path in {p for p in listed if listed.count(p) > 1}
        ]
    assert len(pages) > 15
    assert not wrong


def test_large_plugin_package_has_a_readme():
    lacking = [
        str(folder.relative_to(REPO))
        for folder in {path.parent for path in REPO.glob("plugins/*/vtorque_*/**/*.py")}
        if len(list(folder.glob("*.py"))) > 15 and not (folder / "README.md").exists()
    ]
    assert not lacking


# -- the table of CONTRIBUTING.md --------------------------------------------------------------


def rows():
    """Return subject and place of each row of "to change X, open Y"."""
    table = (REPO / "CONTRIBUTING.md").read_text().partition("| to change | open |\n|---|---|\n")[2]
    return re.findall(r"^\| (.+?) \| (.+?) \|$", table.partition("\n\n")[0] + "\n", re.MULTILINE)


def defined_in(path):
    """Return the names that a Python file defines: functions, classes, their methods, constants."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                inner = [n for n in node.body if isinstance(n, ast.FunctionDef)]
                found |= {f"{node.name}.{method.name}" for method in inner}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_files_and_symbols_to_open_exist():
    """``path``, then the symbols that are in it; a symbol is not a path: it has no slash."""
    wrong = []
    for what, where in rows():
        file = None
        for word in re.findall(r"`([^`]+)`", where):
            if "/" in word:
                file = REPO / word
                if not file.exists():
                    wrong.append(f"{what}: there is no {word}")
                    file = None
            elif file is None or file.suffix != ".py" or word not in defined_in(file):
                wrong.append(f"{what}: {word} is not in {file}")
    assert not wrong


def test_table_of_changes_is_complete():
    found = [what for what, _ in rows()]
    assert len(found) == 43
    assert len(set(found)) == 43


def test_list_of_manuals_has_each_page_once():
    listed = re.findall(r"^\| \[([\w-]+\.md)\]", (REPO / "doc/README.md").read_text(), re.MULTILINE)
    assert sorted([*listed, "README.md"]) == sorted(path.name for path in REPO.glob("doc/*.md"))


# -- Names of modules and files in all texts -------------------------------------------------------

LOGGERS = {"timings", "vsub", "jobshell"}  # below vtorque_core, and no modules


def texts():
    """Yield path and text of everything that people read and write here."""
    for path in tracked():
        if path.suffix in {"", ".py", ".md", ".toml"}:
            yield path, path.read_text(encoding="utf-8", errors="replace")


@functools.cache
def is_in_core(dotted):
    """Return whether ``plan.guests.plan_guests`` names a module of the core, or starts with one."""
    place = REPO / "vtorque_core"
    for word in dotted.split("."):
        if (place / f"{word}.py").is_file():
            return True
        if not (place / word / "__init__.py").is_file():
            return place != REPO / "vtorque_core" and word in (place / "__init__.py").read_text()
        place /= word
    return True


def test_core_modules_named_in_texts_exist():
    wrong = []
    for path, text in texts():
        if path.parent.name == "changes":  # they describe the past
            continue
        found = set(re.findall(r"\bvtorque_core\.(?!py\b)([a-z_]\w*(?:\.\w+)*)", text)) - LOGGERS
        wrong += [f"{path.relative_to(REPO)}: {name}" for name in found if not is_in_core(name)]
    assert not wrong


def test_files_named_in_the_manuals_exist():
    """The test covers modules that design.md names relative to the core, too."""
    wrong = []
    tops = "|".join(path.name for path in [*REPO.iterdir(), *(REPO / "vtorque_core").iterdir()])
    for page in [*REPO.glob("*.md"), *REPO.glob("doc/*.md"), *REPO.glob("plugins/*/README.md")]:
        for word in re.findall(rf"`((?:{tops})/[\w./-]+)(?:::\w+)?`", page.read_text()):
            tried = [top / word for top in (REPO, REPO / "vtorque_core")]
            if not any(path.exists() or Path(f"{path}.py").exists() for path in tried):
                wrong.append(f"{page.relative_to(REPO)}: {word}")
    assert not wrong
