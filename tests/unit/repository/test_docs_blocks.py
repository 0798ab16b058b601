"""Each block of code in the documentation is what its language says, and names what is there.

A page that makes a plugin is run as a whole: tests/e2e/test_first_plugin.py. So is the example in
doc/plugins.md: test_docs.py.
"""

import configparser
import functools
import json
import re
import shlex
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import yaml
from markdown_it import MarkdownIt

from vtorque_core.cli import admin, vmgr
from vtorque_core.site.config import parse_toml, problems
from vtorque_core.site.plugins import Plugins
from vtorque_core.site.schema import OTHER_TABLES, TABLES

REPO = Path(__file__).resolve().parents[3]
PAGES = [
    *REPO.glob("*.md"), *REPO.glob("doc/*.md"), *REPO.glob("plugins/*/README.md"),
    REPO / "testing/README.md",
]  # fmt: skip
LANGUAGES = {
    "console", "diff", "ini", "json", "mermaid", "python", "sh", "text", "toml", "xml", "yaml"
}  # fmt: skip
PROGRAMS = {"vmgr": vmgr.vmgr, "vtorque": admin.vtorque}
FILE = re.compile(r"(?:\./)?((?:scripts|bench|doc|plugins|tests|testing)\b[^\[]*)(?:\[\w+)?")
BETWEEN = re.compile(r"\|\||&&|[;|]")


def parsed(page):
    """Yield where a block is, its language ("" if it has none), its text."""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            where = f"{page.relative_to(REPO)}:{token.map[0] + 1}"
            yield where, token.info, token.content


BLOCKS = [block for page in PAGES if page.name != "first-plugin.md" for block in parsed(page)]


def blocks(*languages):
    return [(where, text) for where, language, text in BLOCKS if language in languages]


def test_each_block_says_its_language():
    wrong = [f"{where}: {language}" for where, language, _ in BLOCKS if language not in LANGUAGES]
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
def test_each_block_can_be_read(language):
    wrong = []
    for where, text in blocks(language):
        try:
            READERS[language](text)
        except Exception as error:
            wrong.append(f"{where}: {error}")
    assert "\n".join(wrong) == ""


@pytest.fixture(scope="module")
def plugins():
    return Plugins.load(node=True)


def test_each_piece_of_a_site_config_is_accepted(plugins):
    wrong = []
    for where, text in blocks("toml"):
        if not {*tomllib.loads(text)} <= {*TABLES, *OTHER_TABLES}:
            continue  # another file's
        # One with all that limits can name.
        whole = text if "[batch]" in text else f'{text}\n[batch]\nsystem = "slurm"\n'
        told = problems(parse_toml(whole.encode()), plugins)
        # Secrets are files of a node.
        wrong += [
            f"{where}: {each}" for each in told if not each.endswith("No such file or directory")
        ]
    assert "\n".join(wrong) == ""


def commands():
    """Yield where a command is, and its words. Brackets around what may be left out are none."""
    for where, text in blocks("sh", "console"):
        lines = text.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            try:
                words = shlex.split(BETWEEN.sub(" ; ", line), comments=True)
            except ValueError:  # a quoted text of many lines
                continue
            while words:
                end = words.index(";") if ";" in words else len(words)
                yield where, [word.strip("[].") for word in words[:end]]
                words = words[end + 1 :]


@functools.cache
def below(group, name):
    """Return a command of a group, which takes time to find."""
    return group.get_command(click.Context(group), name)


def misses(command, words, context=None):
    """Yield what a command of click does not know of these words."""
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


def test_each_command_has_what_is_asked_of_it(plugins):
    keys = {*plugins.options()}
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


def test_each_file_and_distribution_is_there():
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
