"""``vmgr phases``: how long each phase of a job took."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from vtorque_core.base.errors import Refused, printable
from vtorque_core.site.load import load


@click.command(short_help="Show how long each phase of a job took.")
@click.argument("job_id", metavar="[JOB]", default="")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def phases(config: Path, job_id: str, as_json: bool) -> None:
    """Show the time of each phase of a job, running or ended; without JOB the last one.

    Of your jobs, or as root of anybody's.
    """
    from vtorque_core.records.timeline import timeline  # noqa: PLC0415

    site, _ = load(config, node=False)
    uid = None if os.geteuid() == 0 else os.getuid()
    found = timeline(site.paths, job_id or None, uid)
    if not found:
        what = f"job {printable(job_id)}" if job_id else "any job"
        whose = "" if uid is None else " of yours"
        raise Refused(f"nothing is known here of {what}{whose}")
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for phase in found:
        guest = phase["guest"]
        name = phase["name"] if guest is None else f"  guest {guest}: {phase['name']}"
        if "cpu_seconds" in phase:
            used = f"{phase['cpu_seconds']:8.2f} s CPU, at most {phase['peak_mib']} MiB"
            sys.stdout.write(f"{printable(name, 40):40} {used}\n")
            continue
        sys.stdout.write(f"{printable(name, 40):40} {phase['seconds']:8.3f} s\n")
