"""``vmgr ps`` and ``vmgr cancel``. Both call the batch system as the calling user."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import Refused, hooks, printable
from vtorque_core.api.batch_system import JobInfo, JobOnNode, Submitter
from vtorque_core.api.tables import align_rows
from vtorque_core.live import service
from vtorque_core.live.site_config import load

_COLUMNS = ("ID", "NAME", "USER", "STATE", "NODE", "ELAPSED")
_OF_NODES = ("PHASE", "IMAGE", "GUESTS")


@click.command(short_help="List jobs: id, name, owner, state, node, time.")
@click.argument("job_ids", nargs=-1, metavar="[JOB...]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-a", "--all", "ended", is_flag=True, help="Also list ended jobs that have records.")
@click.option(
    "--phase",
    "phases",
    is_flag=True,
    help="Ask each job's nodes for its phase, image and guests.",
)
@click.option(
    "--placement",
    is_flag=True,
    help="Show which jobs hold this node's cores and memory. Root only.",
)
@click.pass_obj
def ps(
    config: Path,
    job_ids: tuple[str, ...],
    as_json: bool,
    ended: bool,
    phases: bool,
    placement: bool,
) -> None:
    """List the jobs that you may see: id, name, owner, state, node, time, reason for waiting.

    --all adds your ended jobs. For root, it adds all ended jobs with records on this node. --phase
    prints a line for each node of a job, with the job's phase, image and guests on that node. It
    queries every node and needs the plugin login (vtorque-login). Exit code 2 if a named job is not
    listed.
    """
    if placement:
        from vtorque_jobs.placement import show  # noqa: PLC0415 - slow, and only for root

        show(config, as_json)
        return
    jobs = sorted(_submitter(config).jobs(), key=lambda job: by_number(job.id))
    live = [job for job in jobs if not job.ended]
    if ended:
        there = {job.id for job in live}
        found = {job.id: job for job in jobs if job.ended}
        found |= {job.id: job for job in _ended_jobs(config) if job.id not in there}
        jobs = [*sorted(found.values(), key=lambda job: by_number(job.id)), *live]
    else:
        jobs = live
    meant = {each: [job for job in jobs if _is_meant(each, job)] for each in job_ids}
    if job_ids:
        jobs = [job for job in jobs if any(job in those for those in meant.values())]
    on_nodes = _on_nodes(config, jobs) if phases else {}
    if as_json:
        _print_json(jobs, on_nodes)
    else:
        _print_table(jobs, on_nodes if phases else None)
    if unknown := [printable(each, 60) or "''" for each in job_ids if not meant[each]]:
        problem = "is listed or has records" if ended else "is listed; --all also lists ended jobs"
        raise Refused(f"no job {', '.join(unknown)} {problem}")


def _is_meant(wanted: str, job: JobInfo) -> bool:
    from vtorque_core.live.kept_jobs import is_meant  # noqa: PLC0415 - not by every ps

    names = {"job": job.id, "known_as": job.known_as}
    return wanted in (job.id, job.id.partition(".")[0]) or is_meant(wanted, names)


def _print_json(jobs: Sequence[JobInfo], on_nodes: Mapping[str, Sequence[JobOnNode]]) -> None:
    found = []
    for job in jobs:
        seen = on_nodes.get(job.id)
        found.append(asdict(job) | ({} if seen is None else {"on_nodes": [*map(asdict, seen)]}))
    click.echo(json.dumps(found, indent=2))


def _print_table(
    jobs: Sequence[JobInfo], on_nodes: Mapping[str, Sequence[JobOnNode]] | None
) -> None:
    columns = (*_COLUMNS, "REASON") if any(job.reason for job in jobs) else _COLUMNS
    rows = [
        (*row, *seen)
        for job in jobs
        for row, seen in _rows(_row(job)[: len(columns)], (on_nodes or {}).get(job.id))
    ]
    for line in align_rows([(*columns, *_OF_NODES) if on_nodes is not None else columns, *rows]):
        click.echo(line)


@click.command(short_help="Cancel jobs, as the batch system would.")
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB...")
@click.pass_obj
def cancel(config: Path, job_ids: tuple[str, ...]) -> None:
    """Cancel jobs. Exit code 0 if all were canceled, otherwise the batch system's exit code."""
    submitter = _submitter(config)
    codes = [submitter.cancel(job_id) for job_id in job_ids]
    sys.exit(max(codes))


def _on_nodes(config: Path, jobs: Sequence[JobInfo]) -> dict[str, list[JobOnNode]]:
    found: dict[str, list[JobOnNode]] = {job.id: [] for job in jobs}
    site, plugins = load(config, node=False)
    for each in plugins.each(hooks.vtorque_jobs_on_nodes, jobs=jobs, site=site, config=config):
        if each.error is not None:
            sys.stderr.write(f"vmgr: plugin {each.plugin}: {printable(str(each.error), 500)}\n")
        else:
            found.setdefault(each.item.job_id, []).append(each.item)
    return found


def _rows(
    row: tuple[str, ...], on_nodes: Sequence[JobOnNode] | None
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    if not on_nodes:
        yield row, () if on_nodes is None else ("",) * len(_OF_NODES)
        return
    at = _COLUMNS.index("NODE")
    for seen in on_nodes:
        here = (*row[:at], printable(seen.node, 60), *row[at + 1 :])
        cells = (seen.phase, 30), (seen.image, 100), (seen.error or ",".join(seen.guests), 200)
        yield here, tuple(printable(text, most) for text, most in cells)


def _submitter(config: Path) -> Submitter:
    site, batch = service.batch_system(config)
    return batch.submitter(site)


def by_number(job_id: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key for job ids: 9.srv before 10.srv, 7[2] before 7[10]."""
    parts = re.findall("[0-9]+|[^0-9]+", job_id)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts)


def _ended_jobs(config: Path) -> Iterator[JobInfo]:
    from vtorque_core.live import kept_jobs  # noqa: PLC0415 - not by every ps

    with contextlib.suppress(Refused):  # no kept records
        for job in kept_jobs.jobs(config, None):
            known = job.facts
            begun, ends = (_values(known, key, (int, float)) for key in ("started", "ended"))
            times = [*begun, *ends]
            if not ends or not all(0 <= time < 1e12 for time in times):
                continue
            name, owner, status, why = (
                "".join(_values(known, key, (str,))[:1])
                for key in ("name", "owner", "status", "reason")
            )
            nodes = ",".join(_values(known, "node", (str,)))
            said = ": ".join(filter(None, [status and f"exit code {status}", why]))
            length = max(ends) - min(times)
            code = int(status) if re.fullmatch("[0-9]{1,9}", status, re.ASCII) else None
            yield JobInfo(
                job.id, name, owner, "ended", nodes, length, said, ended=True, exit_code=code
            )


def _values(known: Iterable[Mapping[str, Any]], key: str, types: tuple[type, ...]) -> list[Any]:
    return [facts[key] for facts in known if isinstance(facts.get(key), types) and facts[key]]


def _row(job: JobInfo) -> tuple[str, ...]:
    minutes, seconds = divmod(int(job.seconds), 60)
    hours, minutes = divmod(minutes, 60)
    elapsed = f"{hours:02}:{minutes:02}:{seconds:02}"
    cells = (job.id, job.name, job.owner, job.state, job.node, elapsed)
    return *(printable(cell, 60) for cell in cells), printable(job.reason, 200)
