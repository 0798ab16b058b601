"""The commands ``vmgr console``, ``vmgr ssh`` and ``vmgr clean``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import Refused, UsageError, kept_records, printable
from vtorque_core.live import jobs, service
from vtorque_linux_guest.attach import attach
from vtorque_linux_guest.guest.contract import SSH_CONFIG

_HOSTNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*", re.ASCII)


@click.command(short_help="Attach to the serial console of a job's guest, or watch it.")
@click.argument("job_id", metavar="JOB")
@click.option("--guest", default=0, show_default=True, help="Index of the guest on this node.")
@click.pass_obj
def console(config: Path, job_id: str, guest: int) -> None:
    """Attach a terminal to a guest's console, as root on the job's node. Leave with Ctrl-].

    For the job's owner, or without a terminal, vmgr console only prints the console's output, as
    vmgr logs --console -f does.
    """
    if os.geteuid() != 0 or not os.isatty(0):
        watch = ["logs", "--console", "--follow", f"--guest={guest}", "--", job_id]
        argv = service.vmgr(config, *watch)
        os.execv(argv[0], argv)  # noqa: S606
    paths = service.paths(config)
    running = [job for job in jobs.RunningJobs(paths).jobs() if job.job.id == job_id]
    found = [job.kept.key for job in running if guest in [each.index for each in job.guests]]
    if not found:
        raise Refused(f"job {printable(job_id)} has no running guest {guest} on this node")
    attach(paths.job_run(found[-1]) / f"g{guest}" / "console.sock")


@click.command(short_help="Log in to a running job's guest, as the job's user.")
@click.argument("job_id", metavar="JOB")
@click.argument("rank", type=int, default=0, metavar="[RANK]")
@click.argument("command", nargs=-1)
@click.pass_obj
def ssh(config: Path, job_id: str, rank: int, command: tuple[str, ...]) -> None:
    """Log in to a running guest of your job with the job's key. Host keys are checked."""
    paths = service.paths(config)
    places = kept_records.find(paths, job_id, os.getuid())
    facts = places[-1].facts() if places else {}
    guests = [each for each in facts.get("guests", ()) if _is_guest(each, rank)]
    moved = [each for each in _migrated_guests(facts) if _is_guest(each | {"index": 0}, rank)]
    if moved and any(_is_guest(each, 0) for each in facts.get("guests", ())):
        guests = [moved[0] | {"index": 0}]  # the first guest's ssh_config covers all guests
    if not guests:
        raise Refused(
            f"this node has no readable records of your job {printable(job_id)}, guest {rank}: "
            "run this command on the node where that guest runs"
        )
    if "phases" not in facts or "ended" in facts:  # recorded when the guests are ready
        raise Refused(f"job {printable(job_id)} has no ready guest: the job is starting or ending")
    ssh_config = paths.job_run(places[-1].key) / f"g{guests[0].get('index')}" / SSH_CONFIG
    if not ssh_config.exists():
        raise Refused(f"guest {rank} does not support ssh: {ssh_config} is missing")
    host = str(guests[0].get("hostname"))
    try:
        os.execvp("ssh", ["ssh", "-F", str(ssh_config), host, "--", *command])  # noqa: S606
    except FileNotFoundError:
        raise Refused("ssh(1) is not installed on this host") from None


def _migrated_guests(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the guests that were migrated to nodes outside the job's allocation."""
    nodes = facts.get("elsewhere")
    for node in nodes.values() if isinstance(nodes, dict) else ():
        known = node.get("guests") if isinstance(node, dict) else None
        guests = known if isinstance(known, list) else []
        yield from (each for each in guests if isinstance(each, dict))


def _is_guest(found: object, rank: int) -> bool:
    """Return whether an entry of ``job.json`` is a guest of this rank.

    On a personal site, guests can write ``job.json``. A forged host name must not become an ssh
    option, and a forged index must not become part of a path.
    """
    if not isinstance(found, dict) or not isinstance(found.get("index"), int):
        return False
    return found.get("rank") == rank and bool(_HOSTNAME.fullmatch(str(found.get("hostname"))))


_LEFT = """#!/bin/sh
dir={}
left=$(find "$dir" -xdev ! -user "$(id -u)" -print 2>/dev/null)
[ -z "$left" ] && echo "$dir: all remaining files are yours" && exit 0
echo "$dir: remaining files of other users:"
echo "$left" | head -n 50
exit 1
"""


@click.command(short_help="Remove files that root in your guests created in a shared directory.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("vsub", nargs=-1, metavar="[-- VSUB_OPTION...]")
@click.pass_obj
def clean(config: Path, directory: Path, vsub: tuple[str, ...]) -> None:
    """Remove files below DIR that root in your guests left and that you cannot remove.

    The command submits a small job. Root in the job's guest removes the files, and the job's output
    lists files that remain. Options of vsub follow --: vmgr clean DIR -- -vm img=debian-12. The
    exit code is vsub's.
    """
    place = os.path.normpath(directory.absolute())
    if not Path(place).is_dir():
        raise UsageError(f"{printable(place)}: is not a directory on this host")
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch, "vmgr-clean")
        script.write_bytes(os.fsencode(_LEFT.format(shlex.quote(place))))
        script.chmod(0o700)
        program = [str(Path(sys.prefix, "bin", "vsub")), "--config", str(config)]
        argv = [*program, "-vm", f"clean={place}", *vsub, str(script)]
        sys.exit(subprocess.run(argv, check=False).returncode)
