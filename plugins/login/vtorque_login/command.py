"""``vmgr state``: the state of a job on its node. ``vmgr ps --phase`` runs this command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from vtorque_core.api import Refused, job_log, kept_records, printable
from vtorque_core.live import service
from vtorque_login import gathered


@click.command(hidden=True)
@click.argument("job_id", metavar="JOB")
@click.option("--files", is_flag=True, help="Also print the records of the job on this node.")
@click.pass_obj
def state(config: Path, job_id: str, files: bool) -> None:
    """Print node, phase, image and guests of your job as JSON. Root can name any job."""
    uid = None if os.geteuid() == 0 else os.getuid()
    places = kept_records.find(service.paths(config), job_id, uid)
    if not places:
        raise Refused(
            f"job {printable(job_id)} does not run on this node, or belongs to another user"
        )
    place = places[-1]
    facts, phase = place.facts(), ""
    for entry in job_log.entries(place):
        phase = entry["phase"] or phase
    guests = facts.get("guests", [])
    said = {"node": facts.get("node", ""), "phase": phase, "guests": guests}
    said |= {"image": facts.get("image", ""), "elsewhere": facts.get("elsewhere", {})}
    if files:
        said |= {"key": place.key, "files": gathered.pack_files(place)}
    click.echo(json.dumps(said))
