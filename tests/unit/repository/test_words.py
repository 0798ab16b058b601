"""Words: texts and names use the terms of the field, not a dialect."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
PLUGINS = sorted(REPO.glob("plugins/*/vtorque_*"))
INSTEAD = {
    r"(?:stands?|stood|standing) still": "suspend, pause",
    r"go(?:es)? on (?:with|as|here|there)\b": "continue, resume, restore",
    r"have it (?:go|be|stand)\b": "the verb itself",
    r"g[ia]ve[sn]? (?:it |them )?back\b": "release",
    r"let(?:s)? go of\b": "release",
    r"whose it is|by whom\b|who has (?:it|them)\b": "owner, group, privileges",
    r"\bof (?:theirs|ours)\b|\bof root's(?:[.,;:]| in\b| that\b)": "root's ..., owned by root",
    r"(?:what|who) brings\b": "plugin, distribution",
    r"what is asked for\b|is asked for\b": "request, option, value",
    r"cannot be had\b|has them is not\b": "missing, unreadable, unknown",
    r"\bis none of\b": "is not a ..., is not supported",
    r"(?<!there )is no (?:file|number|node|user|text|table|path|list|directory)\b": "is not a ...",
    r"(?:is|are) told (?:that|which|what|of)\b|what is told\b": "report, notify",
    r"has (?:not )?said\b": "report, send, answer",
    r"be(?:come)?s? nobody\b": "drop privileges",
    r"ha(?:s|ve) done with\b": "finish",
    r"twice is fine\b": "idempotent",
    r"looks? again\b": "poll, retry",
    r"gives? up patience|loses? patience|has patience": "deadline, timeout",
    r"(?:comes?|came) (?:to )?here\b|is here no more|there no more": "arrive, destination node",
    r"\bno more of\b|(?:held|used|needed) no more\b": "no longer",
}
"""Phrases of the dialect, as regular expressions, and what to write instead."""

ALLOWED: dict[str, int] = {}
"""Files and how many of these phrases each may have."""

_PHRASES = re.compile(rf"\b(?:{'|'.join(f'({each})' for each in INSTEAD)})", re.IGNORECASE)


@dataclass(frozen=True)
class Module:
    """Docstrings and other texts of a module, and its public definitions."""

    strings: str
    functions: tuple[str, ...]
    classes: tuple[str, ...]


@functools.cache
def _module(path: Path) -> Module:
    """Parse a module once for all tests, which takes most of their time."""
    strings, functions, classes = [], [], []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and " " in node.value:
                strings.append(node.value)
        elif isinstance(node, ast.FunctionDef):
            functions.append(node.name)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            classes.append(node.name)
    return Module("\n".join(strings), tuple(functions), tuple(classes))


def _modules(*tops: Path) -> list[Path]:
    """Return the modules of the core, and those below other directories."""
    return [path for top in (REPO / "vtorque_core", *tops) for path in sorted(top.rglob("*.py"))]


def _texts() -> Iterator[tuple[Path, str]]:
    for path in (REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted(REPO.glob("doc/*.md"))):
        yield path, path.read_text("utf-8")
    for path in _modules(REPO / "testing", *PLUGINS):
        yield path, _module(path).strings


def _found(text: str) -> list[str]:
    """Return the phrases in a text, each with what to write instead."""
    instead = tuple(INSTEAD.values())
    found = _PHRASES.finditer(" ".join(text.split()))
    return [f"{each[0]}: write {instead[(each.lastindex or 1) - 1]}" for each in found]


def test_texts_use_the_terms_of_the_glossary():
    found = {str(path.relative_to(REPO)): _found(text) for path, text in _texts()}
    assert {path: each for path, each in found.items() if len(each) > ALLOWED.get(path, 0)} == {}


@pytest.mark.parametrize("text", ["Guests stand\nstill.", "Goes on with it", "A file of root's."])
def test_phrase_of_the_dialect_is_found(text):
    assert len(_found(text)) == 1


@pytest.mark.parametrize("text", ["Resume the guests.", "The file's owner is root."])
def test_plain_sentence_is_accepted(text):
    assert _found(text) == []


SHARED_CLASSES = {
    "Settings": "the table of each plugin in the site config",
    "Site": "the interface that plugins see, and the core's config, which implements it",
}
"""Names of classes that are defined more than once, each with the reason."""

RIDDLES = {
    "apart", "asked", "away", "been", "begun", "beside", "brought", "comes", "dear", "elsewhere",
    "ended", "given", "goes", "gone", "has", "held", "here", "is", "left", "lives", "looks",
    "made", "of", "said", "seen", "settled", "taken", "told", "wanted", "within", "without",
    "works",
}  # fmt: skip
"""Names without verb and object, which no public function of the core has."""


def test_public_functions_of_the_core_have_names_with_verb_or_object():
    found = [(path.name, RIDDLES.intersection(_module(path).functions)) for path in _modules()]
    assert [(file, names) for file, names in found if names] == []


def test_public_class_names_are_unique():
    files: dict[str, list[str]] = {}
    for path in _modules(*PLUGINS):
        for name in _module(path).classes:
            files.setdefault(name, []).append(str(path.relative_to(REPO)))
    twice = {name: each for name, each in files.items() if len(each) > 1}
    assert {name: each for name, each in twice.items() if name not in SHARED_CLASSES} == {}
    assert SHARED_CLASSES.keys() <= twice.keys()
