"""Extract code blocks from the documentation."""

import functools
import tomllib
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

from vtorque_core.config.schema import OTHER_TABLES, TABLES

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    *REPO.glob("*.md"), *REPO.glob("doc/*.md"), *REPO.glob("plugins/*/README.md"),
    REPO / "testing/README.md", REPO / "examples/plugin/README.md",
]  # fmt: skip


class Block(NamedTuple):
    """A block: its place, its language ("" if it has none), its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """The block's place, for messages."""
        return f"{self.page}:{self.line}"


def _parsed(page):
    for token in MarkdownIt().parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            place = str(page.relative_to(REPO))
            yield Block(place, token.map[0] + 1, token.info, token.content)


@functools.cache
def every():
    """Return all blocks. They are read on demand, not at each collection of tests."""
    return [block for page in PAGES for block in _parsed(page)]


def blocks(*languages):
    """Return the blocks in these languages."""
    return [block for block in every() if block.language in languages]


def block(page, begin):
    """Return the text of the one block of a page that starts with this."""
    (text,) = [b.text for b in every() if b.page == page and b.text.startswith(begin)]
    return text


def is_site_config(block):
    """Return whether it is TOML of a site config, not of another file."""
    return block.language == "toml" and {*tomllib.loads(block.text)} <= {*TABLES, *OTHER_TABLES}
