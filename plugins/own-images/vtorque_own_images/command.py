"""``vmgr images pull`` and ``vmgr images save``.

``save`` copies the disk of a running guest that boots the user's own disk. QEMU, which runs as the
user, writes the copy with the content of overlay and backing disk. No other program reads the disk.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import HostFault, Refused, kept_records, name_errors, printable
from vtorque_core.api.values import is_personal
from vtorque_core.live import libvirt
from vtorque_core.live.images import site_of
from vtorque_core.live.jobs import RunningGuest, RunningJobs
from vtorque_own_images import cache
from vtorque_own_images.own_disk import NAME, TARGET
from vtorque_own_images.pull import resolve

_POLL = 0.2  # seconds
_TRANSIENT = 4  # VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB of libvirt/libvirt-domain.h


@click.command()
@click.argument("image")
@click.pass_obj
def pull(config: Path, image: str) -> None:
    """Copy your own image into your cache and convert it, as vsub does.

    IMAGE is docker://NAME[:TAG], oci:DIR[:TAG], docker-archive:FILE or the path of a .sif file.
    """
    site = site_of(config)
    path = Path(resolve(image, site, True))
    found = cache.cache_of(site).entry(path.stem)
    click.echo(f"{found.name if found else path}: {path}")


@click.command()
@click.argument("job_id", metavar="JOB")
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def save(config: Path, job_id: str, file: Path) -> None:
    """Save the disk of a running job that boots your own disk, as the new image FILE.

    FILE must end in .qcow2. It has the state of the first guest's disk at the end of the copy, as
    after a loss of power. Therefore first run sync in the job. The job continues.
    """
    site = site_of(config)
    if not is_personal(site):
        raise Refused("vmgr images save is supported only on your own machine (doc/laptop.md)")
    if file.suffix != ".qcow2":
        raise Refused(f"{printable(str(file))}: the name of the new image must end in .qcow2")
    if os.path.lexists(file):
        raise Refused(f"{printable(str(file))} already exists: name another file")
    keys = [each.key for each in kept_records.find(site.paths, job_id, os.geteuid())]
    running = [job for job in RunningJobs(site.paths).jobs() if job.job.key in keys]
    guests = [g for job in running for g in job.guests if g.rank == 0 and g.ready is not None]
    if not guests:
        raise Refused(f"job {printable(job_id)} has no guest that is ready on this machine")
    copy_disk(guests[-1], file.absolute())
    click.echo(file)


def copy_disk(guest: RunningGuest, file: Path) -> None:
    """Copy the disk of a guest that boots the user's own disk image to a new file.

    Raises Refused if the guest does not boot such an image, HostFault if the copy fails.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")

    def ask(what: str, work: Any) -> Any:
        found = libvirt.on_domain(guest.uri, guest.uuid, what, lambda domain: [work(domain)])
        if found is None:
            raise HostFault(f"guest {guest.hostname} has ended")
        return found[0]

    if f'name="ua-own-images-{NAME}"' not in ask("disks", lambda d: d.XMLDesc(0)).replace("'", '"'):
        raise Refused(f"guest {guest.hostname} does not boot your own disk")
    with name_errors(file):
        target = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # libvirt and QEMU open the file several times. If the guest shares the directory, it could
    # replace the name by a link to another file of the user, but not a descriptor.
    place = f"/proc/{os.getpid()}/fd/{target}"
    to = f"<disk type='file'><driver type='qcow2'/><source file='{place}'/></disk>"
    try:
        ask("copy disk", lambda d: d.blockCopy(TARGET, to, None, _TRANSIENT))
        try:
            while (state := ask("copy disk", lambda d: d.blockJobInfo(TARGET, 0))) and (
                state["cur"] < state["end"] or not state["end"]
            ):
                time.sleep(_POLL)
            if not state:
                raise HostFault(f"QEMU could not write the copy: is there enough space for {file}?")
        except BaseException:
            with suppress(HostFault):  # the copy may have ended
                ask("cancel copy", lambda d: d.blockJobAbort(TARGET, 0))
            raise
        ask("end copy", lambda d: d.blockJobAbort(TARGET, 0))  # complete; the guest keeps its disk
        # Unlike rename(2), this never replaces a file. src_dir_fd selects linkat(2), which follows.
        os.link(place, file, src_dir_fd=target)
    except OSError as error:
        raise HostFault(f"{file}: {error.strerror}") from None
    finally:
        os.close(target)
        part.unlink(missing_ok=True)
