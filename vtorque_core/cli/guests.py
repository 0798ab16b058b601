"""``vmgr console|ssh``: look into the guests of a job on this node."""

from __future__ import annotations

import os
from pathlib import Path

import click

from vtorque_core.base.errors import Refused, UsageError
from vtorque_core.site.load import load


def guest_name(config: Path, job_id: str, index: int) -> tuple[str, str, Path]:
    """Return (domain name, libvirt URI, state directory) of a guest that the journal names.

    Raises Refused if there is none.
    """
    from vtorque_core.records.reading import find  # noqa: PLC0415

    site, _ = load(config, node=False)
    states = find(site.paths, job_id)
    if not states:
        raise Refused(f"job {job_id} has no guest on this node")
    state = states[-1]
    domains = [r for r in state.open if r.kind == "domain" and r.guest == index]
    if not domains:
        raise Refused(f"job {job_id} has no running guest {index} on this node")
    directory = site.paths.job_state(state.key) / f"g{index}"
    return str(domains[0].args["name"]), site.node.libvirt_uri, directory


def need_root(what: str) -> None:
    """Refuse others than root. Raises UsageError."""
    if os.geteuid() != 0:
        raise UsageError(f"{what} is root's: ask your administrator")


@click.command(short_help="Attach to the serial console of a job's guest.")
@click.argument("job_id", metavar="JOB")
@click.option("--guest", default=0, show_default=True, help="Index of the guest on this node.")
@click.pass_obj
def console(config: Path, job_id: str, guest: int) -> None:
    """Attach to the serial console with virsh; leave with Ctrl-]. Root only."""
    need_root("the guests' console")
    name, uri, _ = guest_name(config, job_id, guest)
    os.execvp("virsh", ["virsh", "-c", uri, "console", name])  # noqa: S606


@click.command(short_help="Log in to a running job's guest, as the job's user.")
@click.argument("job_id", metavar="JOB")
@click.argument("rank", type=int, default=0, metavar="[RANK]")
@click.argument("command", nargs=-1)
@click.pass_obj
def ssh(config: Path, job_id: str, rank: int, command: tuple[str, ...]) -> None:
    """Log in to a running guest of your job with the job's own key; host keys are checked."""
    from vtorque_core.node.shell import proof  # noqa: PLC0415

    site, _ = load(config, node=False)
    found = proof.read(site.paths, job_id, os.getuid())
    guests = [g for g in found.guests if g.rank == rank] if found else []
    if not guests:
        raise Refused(f"job {job_id} of yours has no ready guest of rank {rank} on this node")
    client = guests[0].run_dir / "ssh_config"
    if not client.exists():
        raise Refused(f"guests of type {found.guest_type if found else '?'} offer no ssh")
    os.execvp("ssh", ["ssh", "-F", str(client), guests[0].hostname, *command])  # noqa: S606
