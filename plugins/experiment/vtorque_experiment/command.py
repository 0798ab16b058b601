"""The commands of ``vmgr experiment``."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import Refused, UsageError, name_errors, printable
from vtorque_core.api import tables as shown
from vtorque_experiment import compare as comparing
from vtorque_experiment import create, judge, run_session, tables, versions
from vtorque_experiment.export import export_content
from vtorque_experiment.junit import xml
from vtorque_experiment.matrix import count_text
from vtorque_experiment.place import find_existing, validate_place
from vtorque_experiment.results import read

EXIT_REFUSED = 2  # by vsub
EXIT_CONDITION = 3  # a condition of --fail-if is true
EXIT_POINTS = 4  # complete, but points have failed
EXIT_UNFINISHED = 5  # stopped before the end: resume continues

_directory = click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_hours = click.option(
    "--hours", type=click.FloatRange(min=0, min_open=True),
    help="Submit no more points after this time (replaces limits.hours).",
)  # fmt: skip
_numbers = click.option(
    "--number", "names", multiple=True, metavar="NAME", help="Show only this metric; repeatable."
)
_baseline = click.option(
    "--baseline", multiple=True, metavar="AXIS=VALUE",
    help="Compare with the combinations that have this value, such as bare=true; repeatable.",
)  # fmt: skip
_html = click.option(
    "--html", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), metavar="FILE",
    help="Write a self-contained page with plots; - is standard output.",
)  # fmt: skip
_fail_if = click.option(
    "--fail-if", "conditions", multiple=True, metavar="CONDITION",
    help=f"Exit with {EXIT_CONDITION} if the condition holds for a combination, such as "
    '"median(wall) > 1.1 * baseline"; repeatable.',
)  # fmt: skip
_junit = click.option(
    "--junit", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), metavar="FILE",
    help="Write the results of the conditions as JUnit XML, a test case per combination.",
)  # fmt: skip


@click.group(short_help="Run a script with many values, and compare the numbers.")
def experiment() -> None:
    """Run job scripts with many values, record numbers of each job, and compare them.

    A TOML file names job scripts, a matrix of values, repetitions, and the numbers to extract from
    each job: see doc/experiment.md.

    Exit codes: 0 done, 1 failed, 2 wrong usage or refused, 3 a condition of --fail-if is true, 4
    done with failed points, 5 stopped before the end.
    """


@experiment.command(short_help="Run an experiment.")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), metavar="DIR",
    help="Directory of the results; default: FILE with the suffix .results.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True,
    help="List the combinations and ask vsub whether it accepts them; submit nothing.",
)  # fmt: skip
@click.option(
    "--repetitions", type=click.IntRange(min=1), metavar="N",
    help="Replace repetitions of the file, for example 1 for a try with a separate --dir.",
)  # fmt: skip
@_hours
@_json
@click.pass_obj
def run(
    config: Path, file: Path, directory: Path | None, dry_run: bool, repetitions: int | None,
    hours: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Run an experiment to its end. Ctrl-C stops the run; submitted jobs continue."""
    if not file.name:
        raise UsageError(f"{file}: is not a file")
    place = validate_place(directory or file.with_suffix(".results"))
    planned = run_session.plan_experiment(config, file, _report_progress, repetitions)
    if dry_run:
        click.echo(json.dumps(planned.data(), indent=2) if as_json else "\n".join(planned.lines()))
    for line in planned.reasons():
        _report_progress(f"vsub would reject {line}")
    if planned.is_hopeless or (dry_run and planned.refused):
        sys.exit(EXIT_REFUSED)
    if dry_run:
        return
    plan = create.create(
        file, place, functools.partial(versions.collect_versions, config), repetitions
    )
    click.echo(f"results are in {place.top}", err=True)
    _end(run_session.run(config, place, hours, _report_progress, new_plan=plan), as_json)


@experiment.command(short_help="Continue a stopped experiment.")
@_directory
@click.option("--failed", is_flag=True, help="Also run the failed points again.")
@click.option(
    "--accept", metavar="SEAL", default="",
    help="Submit the plan with this seal, although it was changed or run began on another host.",
)  # fmt: skip
@_hours
@_json
@click.pass_obj
def resume(
    config: Path, directory: Path, failed: bool, accept: str, hours: float | None, as_json: bool
) -> None:
    """Continue an experiment, however it was stopped. No point is run twice.

    DIR contains the plan (the jobs to submit). Jobs in guests can change the plan. If the plan
    has changed since vmgr experiment run, or you call resume on another host, resume submits jobs
    only with --accept.

    resume also extracts the measured numbers of failed points again from the output of their
    ended jobs, because you may have corrected experiment.toml in DIR.
    """
    ended = run_session.run(
        config, find_existing(directory), hours, _report_progress, failed=failed, accept=accept
    )  # fmt: skip
    _end(ended, as_json)


@experiment.command(short_help="Show the progress of an experiment, and failed points.")
@_directory
@_json
def status(directory: Path, as_json: bool) -> None:
    """Show the progress of an experiment, and which points have failed, with reasons."""
    found = run_session.status(directory)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(found["state"])
    rows = [tuple(map(str, failed.values())) for failed in found["failed"][:100]]
    shown.show(("POINT", "JOB", "COMBINATION", "REASON"), rows)
    more = len(found["failed"]) - len(rows)
    if more > 0:
        click.echo(f"and {more} more: use --json to list all")


@experiment.command(short_help="Show statistics of each combination's numbers.")
@_directory
@_numbers
@_html
@_fail_if
@_junit
@_json
def results(
    directory: Path, names: Sequence[str], html: Path | None, conditions: Sequence[str],
    junit: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show the numbers of each combination: runs, median, spread, least and most.

    Spread is the interquartile range divided by the median. Failed points are omitted.
    """
    found = read(directory)
    for name in names:
        if name not in found.names:
            raise Refused(
                f"{name}: not recorded in this experiment; known: "
                f"{', '.join(found.names) or 'none'}"
            )
    judged = judge.judge_results(found, conditions)
    if html is not None:
        from vtorque_experiment import page  # noqa: PLC0415 - jinja2, Vega's runtime

        _page(page.results_page(found), html, page.plots_hint())
    elif as_json:
        click.echo(json.dumps(run_session.data(found, names or found.names), indent=2))
    elif str(junit) != "-":
        heads, rows = tables.summary_table(found, names or [n for n in found.names if n != "code"])
        shown.show(_upper_case(heads), rows, (tables.state(found), *tables.warnings(found)))
    _exit_by_conditions(judged, found.title, junit)


@experiment.command(short_help="Compare two experiments, or combinations within one.")
@_directory
@click.argument("other", type=click.Path(path_type=Path), metavar="[DIR]", required=False)
@_baseline
@_numbers
@_html
@_fail_if
@_junit
@_json
def compare(  # noqa: PLR0913 - one for each option
    directory: Path, other: Path | None, baseline: Sequence[str], names: Sequence[str],
    html: Path | None, conditions: Sequence[str], junit: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare the second experiment with the first, combination by combination.

    With --baseline AXIS=VALUE, compare combinations of one experiment: each combination with the
    combination that has VALUE on AXIS and is otherwise equal. The ratio of the medians has a 95 %
    confidence interval.
    """
    if (other is None) == (not baseline):
        raise UsageError(
            "vmgr experiment compare: name two experiments, or one experiment and --baseline"
        )
    base = read(directory)
    if other is not None:
        pairs, title = comparing.experiments(base, read(other), names), f"{other} / {directory}"
        sides = ("base", "other")
    else:
        pairs = comparing.compare_within(base, baseline, names)
        title = f"{base.title}: {baseline[0]}"
        sides = ("baseline", "this")
    judged = judge.judge_pairs(pairs, conditions)
    if html is not None:
        from vtorque_experiment import page  # noqa: PLC0415 - as above

        lines = [f"base: {tables.state(base)}"]
        _page(page.comparison_page(title, lines, pairs, sides), html, page.plots_hint())
    elif as_json:
        click.echo(json.dumps([pair.data() for pair in pairs], indent=2))
    elif str(junit) != "-":
        heads, rows = tables.comparison_table(pairs)
        shown.show(_upper_case(heads), rows, tables.warnings_of_pairs(pairs))
    _exit_by_conditions(judged, title, junit)


@experiment.command(short_help="Write all points as CSV, JSON or Parquet.")
@_directory
@click.option("--format", "kind", type=click.Choice(["csv", "json", "parquet"]), default="csv")
@click.option(
    "--output", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), default="-",
    metavar="FILE", help="Output file; default: standard output.",
)  # fmt: skip
def export(directory: Path, kind: str, output: Path) -> None:
    """Write one row for each point: state, job, axes, numbers."""
    _write(export_content(read(directory), kind), output)


def _report_progress(line: str) -> None:
    click.echo(f"vmgr experiment: {line}", err=True)


def _end(ended: Any, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(ended.status, indent=2))
    else:
        click.echo(ended.status["state"])
    if not ended.finished:
        _report_progress(f"{ended.why}; to continue: vmgr experiment resume {ended.directory}")
        sys.exit(EXIT_UNFINISHED)
    failed = len(ended.status["failed"])
    if failed:
        _report_progress(
            f"{count_text(failed, 'failed point')}: vmgr experiment status {ended.directory} says "
            "why; vmgr experiment resume reads their numbers again, with --failed it reruns them"
        )
        sys.exit(EXIT_POINTS)


def _upper_case(heads: Sequence[str]) -> list[str]:
    return [head.upper() for head in heads]


def _page(text: str, path: Path, hint: str) -> None:
    _write(text.encode("utf-8", "replace"), path)
    if str(path) != "-":
        _report_progress(f"the page is {path.absolute()}: open it in a browser")
    if hint:
        _report_progress(f"it is {hint}")


def _write(content: bytes, path: Path) -> None:
    if str(path) == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return
    with name_errors(printable(str(path)), fault=Refused):
        path.write_bytes(content)


def _exit_by_conditions(judged: Any, title: str, junit: Path | None) -> None:
    if junit is not None:
        _write(xml(title, judged.cases), junit)
    if not judged.asked:
        return
    for case in judged.cases:
        if case.failure or case.error:
            _report_progress(f"{case.name}: {case.failure or case.error}")
    if any(case.error for case in judged.cases):
        sys.exit(1)
    if any(case.failure for case in judged.cases):
        sys.exit(EXIT_CONDITION)
