"""The original IOcm: dynamic-io-manager (Python 2), on kernels that share vhost workers.

github.com/mikelangelo-project/dynamic-io-manager moves vhost devices between workers, guests and
interrupts between CPUs: here, all over the CPUs of one job. It must be told of every vhost device,
so one job has it at a time, with no other guests on the node.

We run what its start_io_manager.py runs. Its stop_io_manager.py stops nothing if root calls it, so
it runs in the foreground (``-p``: no daemon, no pid file) as the core's ``Process``: found by the
lock that it holds, ended by TERM, after a grace KILL.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from vtorque_core.api import HostFault, require_root_owned, run_tool
from vtorque_core.api.daemon_process import Process
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.job_files import File
from vtorque_core.api.node_job import NodeJob
from vtorque_core.api.vcpu_threads import process_of

VHOST = Path("/sys/class/vhost")  # of the patched kernel
Limits = tuple[int, int]  # least and most I/O cores


def there() -> bool:
    """Return whether this kernel shares vhost workers."""
    return (VHOST / "worker").is_dir()


def start(job: NodeJob, python2: str, source: str, limits: Limits, nics: Sequence[str]) -> None:
    """Start it, from the directory ``source``, for the job's guests. Raises HostFault, ConfigError.

    Root runs what lies there: nobody else may be able to write any of it (ConfigError).
    """
    for part in (Path(python2), Path(source), *Path(source).rglob("*")):
        require_root_owned(part, os.geteuid())
    devices = sorted(d.name for d in (VHOST / "dev").glob("d.*"))
    if len(devices) != len(job.guests):
        raise HostFault(
            f"{len(devices)} vhost devices for {len(job.guests)} guests: dynamic-io-manager needs "
            "one network interface per guest, and no other guests on the node"
        )
    cpus = sorted({cpu for guest in job.guests for cpu in _cpus(guest)})
    text = config(cpus, [_pid(guest) for guest in job.guests], devices, limits, nics)
    path = str(job.guests[0].run_dir / "iocm.json")
    file = job.acquire(File(path, content=text.encode()))
    run_tool(python2, f"{source}/reconfigure.py", path, "-p", "interval:0.1")
    argv = (python2, f"{source}/io_manager.py", "-s", path, "-p")
    job.acquire(Process(argv, lock=f"{path}.lock"), needs=[file])


def config(
    cpus: Sequence[int],
    pids: Sequence[str],
    devices: Sequence[str],
    limits: Limits,
    nics: Sequence[str],
) -> str:
    """Return its configuration, JSON, for these CPUs (ascending), guests and host interfaces."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - every hook

    most = min(limits[1], len(cpus) - 1)
    loader = PackageLoader("vtorque_iocm", "")
    environment = Environment(loader=loader, undefined=StrictUndefined)  # noqa: S701 - not HTML
    return environment.get_template("legacy.json.j2").render(
        cpus=cpus,
        guests=list(zip(range(1, len(pids) + 1), pids, devices, strict=True)),
        nics=list(enumerate(nics)),
        least=min(limits[0], most),
        most=most,
    )


def _pid(guest: GuestPlan) -> str:
    process = process_of(guest.name, guest.uuid)
    if process is None:
        raise HostFault(f"guest {guest.name} has ended")
    return process.name


def _cpus(guest: GuestPlan) -> set[int]:
    at = guest.placement
    return {*at.cores["io"], *(at.cores["vcpu"] or at.share or guest.host.cpus)}
