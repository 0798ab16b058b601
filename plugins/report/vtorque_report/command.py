"""``vmgr report``: the click command. What it needs is imported when it runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write a page with plots, without anything from elsewhere in it.",
)  # fmt: skip
@click.option(
    "--from", "more", multiple=True, metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Add what another node has kept: a copy of its <state>/kept/<uid>/<job>. May be repeated.",
)  # fmt: skip
@click.pass_obj
def report(
    config: Path, job_id: str, as_json: bool, html: Path | None, more: tuple[Path, ...]
) -> None:
    """Say what a job did with what it asked for, running or ended: yours, as root anybody's.

    CPU, memory, disk, network, phases, and what to ask for next time.
    """
    from vtorque_core.api.kept_records import attempts  # noqa: PLC0415
    from vtorque_core.live import service  # noqa: PLC0415
    from vtorque_report import load  # noqa: PLC0415

    places = attempts(service.paths(config), job_id)
    found = load.report([places[-1].directory, *more], time.time())
    if html is not None:
        from vtorque_report import page, plots  # noqa: PLC0415 - jinja2, Vega's runtime

        load.write(html, page.render(found).encode())
        if not plots.can_draw():
            click.echo(f"vmgr report: {html} is {plots.CANNOT_DRAW}", err=True)
        return
    if as_json:
        click.echo(json.dumps(found.data(), indent=2))
        return
    from vtorque_report import text  # noqa: PLC0415 - rich

    load.tolerate(sys.stdout)
    text.show(found, sys.stdout)
