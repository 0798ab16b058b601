"""The click command ``vmgr report``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from vtorque_core.api import Refused, UsageError, printable
from vtorque_core.api.kept_records import Place
from vtorque_core.live import kept_jobs
from vtorque_core.live.kept_jobs import KeptJob
from vtorque_report import load
from vtorque_report.report import JobArray, Report


@click.command()
@click.argument("job_id", metavar="[JOB]", default="")
@click.option("--last", is_flag=True, help="Report the job with the newest records.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option(
    "--html", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), metavar="FILE",
    help="Write a self-contained page with plots; - is standard output.",
)  # fmt: skip
@click.option(
    "--from", "more", multiple=True, metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Add the records of another node from a copy of its <state>/kept/<uid>/<job>; repeatable.",
)  # fmt: skip
@click.pass_obj
def report(
    config: Path,
    job_id: str,
    last: bool,
    as_json: bool,
    html: Path | None,
    more: tuple[Path, ...],
) -> None:
    """Report how your running or ended job used what it requested. Root can name any job.

    Shows CPU, memory, disk, network, phases, and what to request next time. A job on several nodes
    has one report with a row for each node. An array (22[], 22[].server, 22) has a row for each
    task.
    """
    if bool(job_id) == last:
        raise UsageError("vmgr report: name a job, or use --last")
    jobs = kept_jobs.jobs(config, job_id or None)
    found = _find_report(jobs[-1:] if last else jobs, more)
    if html is not None:
        from vtorque_report import drawing, page  # noqa: PLC0415 - jinja2, Vega's runtime

        content = page.render(found).encode()
        if str(html) == "-":
            sys.stdout.buffer.write(content)
        else:
            load.write(html, content)
        if not drawing.can_draw():
            click.echo(f"vmgr report: {html} is {drawing.CANNOT_DRAW}", err=True)
        return
    if as_json:
        click.echo(json.dumps(found.data(), indent=2))
        return
    from vtorque_report import text  # noqa: PLC0415 - rich

    load.tolerate(sys.stdout)
    text.show(found, sys.stdout)


def _find_report(jobs: Sequence[KeptJob], more: Sequence[Path]) -> Report | JobArray:
    now = time.time()
    if len(jobs) == 1:
        return load.report([*_places(jobs[0]), *more], now)
    if more:
        raise UsageError("--from needs exactly one job, but several are named")
    elements = []
    for job in jobs:
        try:
            elements.append(load.report(_places(job), now, load.FEW_LINES))
        except Refused as error:
            click.echo(f"vmgr report: {printable(job.id)} is skipped: {error}", err=True)
    if not elements:
        raise Refused("none of these jobs has readable records")
    return JobArray(tuple(elements))


def _places(job: KeptJob) -> Sequence[Place]:
    readable = [place for place, facts in zip(job.places, job.facts, strict=True) if facts]
    return readable or job.places[:1]
