"""``vtorque config explain``: a job's effective options, and the config lines that set them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import UsageError, printable
from vtorque_core.api.tables import align_rows
from vtorque_core.live.site_config import (
    CONFIG_PATH,
    OF_BATCH,
    Facts,
    Plugins,
    Site,
    applies,
    effective_default,
    facts_of_user,
    for_job,
    load,
    show_limits,
)


@click.command()
@click.option(
    "--file",
    "path",
    type=click.Path(readable=False, path_type=Path),
    default=CONFIG_PATH,
    show_default=True,
    help="The config to read.",
)
@click.option("--as", "user", required=True, metavar="USER", help="The job's owner.")
@click.option("--queue", help="The job's queue.")
@click.option("--partition", help="The job's partition.")
@click.option("--account", help="The job's account.")
@click.option("--qos", help="The job's quality of service.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(path: Path, user: str, as_json: bool, **told: str | None) -> None:
    """Print the limits of a job, and the config lines that set them ([options], [[limits]])."""
    site, plugins = load(path, node=True)
    try:
        facts = facts_of_user(user)
    except KeyError:
        raise UsageError(f"--as {printable(user)}: there is no such user on this host") from None
    facts |= {name: (value,) for name in OF_BATCH if (value := told[name]) is not None}
    found = report(site, plugins, facts)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def report(site: Site, plugins: Plugins, facts: Facts) -> dict[str, Any]:
    """Return the limits of a job with ``facts`` (user, queue and others) as data for ``--json``.

    In ``entries``, ``counts`` is true if a ``[[limits]]`` entry applies to the job, false if not,
    and null if this depends on a fact that is not given. Entries with null are ignored. The
    ``line`` of a built-in default is null.
    """
    known: Facts = {**dict.fromkeys(OF_BATCH, ()), **facts}
    of_job, its = for_job(site, plugins, known)
    options: dict[str, dict[str, Any]] = {}
    for key, option in its.options().items():
        limits = of_job.options[key]
        found = {
            "default": option.show(effective_default(option, limits)),
            **show_limits(option, limits),
        }
        for name, value in found.items():
            line = site.raw.line(limits.set_by[name]) if name in limits.set_by else None
            options.setdefault(key, {})[name] = {"value": value, "line": line}
    last = {name: e.number for e in site.limits if applies(e, known) for name in e.plugins}
    off = {name: site.raw.line(f"limits.{last[name]}.plugins.{name}") for name in its.withheld}
    entries = [
        {
            "entry": str(e),
            "line": site.raw.line(f"limits.{e.number}"),
            "counts": applies(e, facts),
            "unknown": sorted(e.jobs.keys() - facts.keys()),
        }
        for e in site.limits
    ]
    job = {name: list(names) for name, names in facts.items()}
    return {"file": str(site.path), "job": job, "entries": entries, "options": options, "off": off}


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['file']}: a job of " + ", ".join(
        f"{name} {' '.join(names)}" for name, names in found["job"].items()
    )
    entries = [(e["entry"], f"line {e['line']}", _counts(e)) for e in found["entries"]]
    yield from align_rows(entries) if entries else ()
    free, rows = [], []
    for key, limits in sorted(found["options"].items()):
        default = limits["default"]
        if len(limits) == 1 and default["line"] is None:
            free.append(f"{key}={_words(default)}")
        else:
            rows.append(
                (key, "; ".join(f"{n} {_words(v)}{_limit_place(v)}" for n, v in limits.items()))
            )
    yield from align_rows(rows) if rows else ()
    yield from (f"plugin {name}: off (line {line})" for name, line in found["off"].items())
    yield f"without limits, by default: {' '.join(free)}"


def _counts(entry: Mapping[str, Any]) -> str:
    if entry["counts"] is None:
        return f"may count: add {' '.join(f'--{name}' for name in entry['unknown'])}"
    return "counts" if entry["counts"] else "not for this job"


def _words(limit: Mapping[str, Any]) -> str:
    value = limit["value"]
    return (value if isinstance(value, str) else " ".join(value)) or "none"


def _limit_place(limit: Mapping[str, Any]) -> str:
    return f" (line {limit['line']})" if limit["line"] else ""
