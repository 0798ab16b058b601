"""Each block of code in the documentation is valid and names only existing things.

test_docs_run.py runs some of them.
"""

import configparser
import functools
import json
import re
import shlex
import tomllib
from xml.etree import ElementTree

import click
import pytest
import yaml

import doc_blocks
from doc_blocks import PAGES, REPO, blocks, every, is_site_config
from vtorque_core.cli import admin, vmgr
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import problems
from vtorque_core.config.site_file import parse_toml

LANGUAGES = {
    "console", "diff", "ini", "json", "python", "sh", "text", "toml", "xml", "yaml"
}  # fmt: skip
PROGRAMS = {"vmgr": vmgr.vmgr, "vtorque": admin.vtorque}
FILE = re.compile(r"(?:\./)?((?:scripts|bench|doc|plugins|tests|testing)\b[^\[]*)(?:\[\w+)?")
PROJECTS = [*REPO.glob("plugins/*/pyproject.toml"), REPO / "testing/pyproject.toml"]
BETWEEN = re.compile(r"\|\||&&|[;|]")


def test_each_block_names_its_language():
    wrong = [f"{b.where}: {b.language}" for b in every() if b.language not in LANGUAGES]
    assert "\n".join(wrong) == ""


READERS = {
    "json": lambda text: [json.loads(line) for line in re.split(r"\n(?=\{)", text)],
    "ini": lambda text: configparser.ConfigParser(strict=False, interpolation=None).read_string(
        text
    ),
    "python": lambda text: compile(text, "block", "exec"),
    "toml": tomllib.loads,
    "xml": lambda text: ElementTree.fromstring(re.sub(r"\{%.*?%\}", "", text).strip()),  # noqa: S314 - our own
    "yaml": yaml.safe_load,
}


@pytest.mark.parametrize("language", READERS)
def test_each_block_can_be_parsed(language):
    wrong = []
    for block in blocks(language):
        try:
            READERS[language](block.text)
        except Exception as error:
            wrong.append(f"{block.where}: {error}")
    assert "\n".join(wrong) == ""


@pytest.fixture(scope="module")
def plugins():
    return Plugins.load(node=True)


def test_each_site_config_block_is_accepted(plugins):
    wrong = []
    for block in filter(is_site_config, blocks("toml")):
        # A config with everything that limits can name.
        other = "" if "[batch]" in block.text else '\n[batch]\nsystem = "slurm"\n'
        whole = block.text + other
        told = problems(parse_toml(whole.encode()), plugins)
        # Secrets are files of a node.
        wrong += [
            f"{block.where}: {each}"
            for each in told
            if not each.endswith("No such file or directory")
        ]
    assert "\n".join(wrong) == ""


def commands():
    """Yield each command's place and words. Brackets around optional words are removed."""
    for block in blocks("sh", "console"):
        lines = block.text.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            try:
                words = shlex.split(BETWEEN.sub(" ; ", line), comments=True)
            except ValueError:  # a quoted text of many lines
                continue
            while words:
                end = words.index(";") if ";" in words else len(words)
                yield block.where, [word.strip("[].") for word in words[:end]]
                words = words[end + 1 :]


@functools.cache
def below(group, name):
    """Return a command of a group; the result is cached."""
    return group.get_command(click.Context(group), name)


def misses(command, words, context=None):
    """Yield the words that a command of click does not know."""
    context = click.Context(command, parent=context)
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    known |= {"--help", "-h"}
    while words and words[0].startswith("-"):
        option, _, _ = words.pop(0).partition("=")
        if option not in known:
            yield option
        taker = next((p for p in command.params if option in p.opts), None)
        if isinstance(taker, click.Option) and not (taker.is_flag or taker.count):
            words = words[1:]
    if isinstance(command, click.Group) and words:
        found = below(command, words[0])
        if found is None:
            yield words[0]
        else:
            yield from misses(found, words[1:], context)
    else:
        options = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
        yield from options - known


def test_each_command_has_the_named_options(plugins):
    keys = {*plugins.options(), "acme_fpga", "acme_mode"}  # of doc/first-plugin.md
    wrong, seen = [], 0
    for where, words in commands():
        program = words[0].rpartition("/")[2] if words else ""
        if program in PROGRAMS:
            seen += 1
            wrong += [f"{where}: {program} {each}" for each in misses(PROGRAMS[program], words[1:])]
        elif program == "vsub":
            seen += 1
            asked = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "-vm"]
            named = {each.partition("=")[0] for one in asked for each in one.split(",")}
            wrong += [f"{where}: vsub -vm {each}" for each in named - keys - {"none", ""}]
    assert "\n".join(wrong) == ""
    assert seen > 50


def test_each_named_file_and_distribution_exists():
    wrong = []
    for where, words in commands():
        for word in words:
            path = FILE.fullmatch(word)
            if path and not (REPO / path[1]).exists():
                wrong.append(f"{where}: {word}")
            name = re.fullmatch(r"vtorque-([a-z-]+)(?:\[\w+)?", word) if "pip" in words[0] else None
            if name and name[1] != "core" and not (REPO / "plugins" / name[1]).is_dir():
                wrong.append(f"{where}: {word}")
    assert "\n".join(wrong) == ""


def distributions():
    """Return directory and extra of each distribution to its name, and its own requirements."""
    found = {}
    for path in (REPO / "pyproject.toml", *PROJECTS):
        project = tomllib.loads(path.read_text())["project"]
        for extra, more in {"": [], **project.get("optional-dependencies", {})}.items():
            wanted = {re.split("[<>=~!;[ ]", each)[0] for each in [*project["dependencies"], *more]}
            ours = {name for name in wanted if name.startswith("vtorque-")}
            found[path.parent, extra] = (project["name"], ours)
    return found


def test_each_install_line_has_all_required_own_distributions():
    """No index has these distributions: each line has all dependencies of its others."""
    known, seen, wrong = distributions(), 0, []
    for block in blocks("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            paths = re.findall(r"(?<=[ '\"])(\.(?:/[\w/-]+)?)(?:\[(\w+)\])?(?=[ '\"]|$)", line)
            if re.match(r"\S*pip (install|wheel)", line) and paths:
                asked = [known[(REPO / path).resolve(), extra] for path, extra in paths]
                missing = set().union(*(needs for _, needs in asked)) - {name for name, _ in asked}
                wrong += [f"{block.where}: {name}" for name in missing]
                seen += 1
    assert "\n".join(wrong) == ""
    assert seen > 25


def lines_of(page):
    """Return the shell lines of a page in order, with continued lines joined."""
    found = [block.text for block in blocks("sh") if block.page == page]
    return [line for text in found for line in text.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", ["doc/admin.md", "doc/ten-minutes-admin.md"])
def test_each_installed_wheel_was_built_before(page):
    """vtorque-login was missing in the wheels for admin.md's submit hosts."""
    known, built, wrong = distributions(), set(), []
    seen = 0
    for line in lines_of(page):
        if "pip wheel" in line:
            paths = re.findall(r"(?<=[ '])(\.(?:/[\w/-]+)?)(?=[\[ ']|$)", line)
            built |= {known[(REPO / path).resolve(), ""][0] for path in paths}
        elif "--find-links wheels" in line:
            seen += 1
            wrong += {*re.findall(r"vtorque-[a-z-]+", line)} - built
    assert (wrong, seen > 0) == ([], True)


def test_submit_hosts_of_the_manual_understand_the_config_of_their_nodes():
    """A vsub without a plugin that has settings in the config ends with an error."""
    (line,) = [each for each in lines_of("doc/admin.md") if "vtorque-core vtorque-pbs" in each]
    installed = {*re.findall(r"vtorque-([a-z-]+)", line)} - {"core"}
    plugins = Plugins.load(node=False, only=installed)
    tables = ("pbs", "login", "archive", "survive", "joblog")
    text = '[batch]\nsystem = "torque"\n' + "".join(f"[plugin.{name}]\n" for name in tables)
    assert list(problems(parse_toml(text.encode()), plugins)) == []


def test_no_page_has_torque_wait_for_a_job():
    """Torque's qsub refuses -W block=true."""
    pages = [*PAGES, *REPO.glob("examples/*/README.md")]
    named = [line for page in pages for line in page.read_text().splitlines()]
    wrong = [line for line in named if re.search(r"Torque[^:;.]*: `vsub -W block=true", line)]
    assert wrong == []
    assert "block=true" not in doc_blocks.block("doc/user.md", "$ vsub")
