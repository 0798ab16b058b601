"""Implement ``vtorque plugins new``: create a complete distribution from templates.

The files are copies of ``templates/common`` and of the directories that :data:`KINDS` lists.
Words between ``@`` in their paths and texts are replaced by values derived from the plugin's name.
A batch adapter is a renamed copy of :mod:`vtorque_testing.example`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import click

from vtorque_core.api import Refused, printable

_HERE = Path(__file__).parent
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 30  # characters of a name


@dataclass(frozen=True)
class Kind:
    """A kind of plugin.

    Attributes:
        what: description for the generated project.
        templates: directories of templates.
        points: entry points of the distribution, by group.
        depends: further dependencies.
        tests: further dependencies of the tests.
    """

    what: str
    templates: tuple[str, ...]
    points: dict[str, str]
    depends: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


KINDS = {
    "device": Kind(
        "A device: -vm @KEY@=N gives each guest N cards, which no other guest has.",
        ("device",),
        {"vtorque1": "plugin", "vtorque1.node": "node"},
        tests=("vtorque-linux-guest",),
    ),
    "batch": Kind(
        "The batch system @WORD@.",
        ("batch",),
        {"vtorque1": "plugin", "vtorque1.node": "node"},
    ),
    "builder": Kind(
        "An image builder: vmgr images build NAME @NAME@ -o disk=FILE.",
        ("builder",),
        {"vtorque1": "plugin"},
    ),
    "guest": Kind(
        "The guest type @NAME@, whose guests run vtorque-agent, and a builder of its images.",
        ("guest",),
        {"vtorque1": "plugin"},
        depends=("vtorque-linux-guest",),
    ),
    "exporter": Kind(
        'An exporter of samples: exporters = ["@NAME@"] in [plugin.telemetry].',
        ("exporter", "lines"),
        {"vtorque1.node": "node", "vtorque1.telemetry": "export:open_sink"},
        depends=("vtorque-telemetry",),
    ),
    "sink": Kind(
        'A sink of jobs\' logs: sinks = ["@NAME@"] in [plugin.joblog].',
        ("sink", "lines"),
        {"vtorque1.node": "node", "vtorque1.joblog": "log:open_sink"},
        depends=("vtorque-joblog",),
    ),
}


def write(name: str, kind: Kind, top: Path) -> Path:
    """Create the distribution's directory below ``top``; return its path. Raises Refused."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        shown = printable(name, 40)
        raise Refused(f"{shown!r} is not a name for a plugin: use lower-case letters, digits and -")
    distribution = f"vtorque-{name}"
    package = distribution.replace("-", "_")
    made = top / distribution
    if made.exists():
        raise Refused(f"{made} exists already: choose another name, or remove it")
    points = [
        f'[project.entry-points."{group}"]\n{name} = "{package}.{module}"\n'
        for group, module in kind.points.items()
    ]
    words = {
        "WHAT": kind.what, "NAME": name, "DISTRIBUTION": distribution, "PACKAGE": package,
        "WORD": name.replace("-", ""), "CLASS": name.replace("-", "").capitalize(),
        "KEY": name.replace("-", "_"), "VARIABLE": f"{package}".upper(),
        "DEPENDS": ", ".join(f'"{each}"' for each in ("vtorque-core>=1.0.0.dev0", *kind.depends)),
        "TESTS": "".join(f'"{each}", ' for each in kind.tests), "POINTS": "\n".join(points),
    }  # fmt: skip
    for directory in ("common", *kind.templates):
        source = _HERE / "templates" / directory
        for path in sorted(source.rglob("*.txt")):
            target = str(path.relative_to(source)).removesuffix(".txt").replace("PACKAGE", package)
            _write(made / target, path.read_text(encoding="utf-8"), words)
    if kind is KINDS["batch"]:
        _write_batch(made, name, package)
    return made


def _write_batch(made: Path, name: str, package: str) -> None:
    """Write the example batch adapter and its harness under another name."""
    word = name.replace("-", "")
    renamed = {
        "vtorque_testing.example_harness": "harness", "vtorque_testing.example": "@PACKAGE@.batch",
        "Acme": word.capitalize(), "ACME": word.upper(), "acme": word, "@PACKAGE@": package,
    }  # fmt: skip
    targets = {"example": f"{package}/batch.py", "example_harness": "tests/harness.py"}
    for module, target in targets.items():
        text = (_HERE / f"{module}.py").read_text(encoding="utf-8")
        for old, other in renamed.items():
            text = text.replace(old, other)
        _write(made / target, text, {})


def _write(path: Path, text: str, words: dict[str, str]) -> None:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@click.command()
@click.argument("name")
@click.option("--device", "kind", flag_value="device", help="Cards, leased and given to guests.")
@click.option("--batch", "kind", flag_value="batch", help="A batch system.")
@click.option("--guest", "kind", flag_value="guest", help="Another kind of guest.")
@click.option("--builder", "kind", flag_value="builder", help="Builds images.")
@click.option("--exporter", "kind", flag_value="exporter", help="Sends samples to another system.")
@click.option("--sink", "kind", flag_value="sink", help="Sends jobs' logs to another system.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    help="Where to create its directory; the default is here.",
)
def new(name: str, kind: str | None, directory: Path) -> None:
    """Create the distribution of a new plugin NAME, which is installable and passes its tests."""
    if kind is None:
        raise click.UsageError(f"choose the kind: {', '.join(f'--{each}' for each in KINDS)}")
    made = write(name, KINDS[kind], directory)
    click.echo(f"created {made}: see {made}/README.md")
