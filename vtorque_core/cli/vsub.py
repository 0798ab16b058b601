"""``vsub``: the site's submit command, plus ``-vm key=value[,key=value...]``.

Runs as the user. Imports nothing that a submission does not need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vtorque_core.api import JobRequest, Option
from vtorque_core.api_options import ARCH, DISTRO, FS_TYPE, IMG, SHOW_LOG
from vtorque_core.cli.site import load_for_user
from vtorque_core.config import Site
from vtorque_core.errors import Refused, VtorqueError
from vtorque_core.image_pool import ramdisk_mib, select
from vtorque_core.limits import Limits, effective_default
from vtorque_core.log_stderr import debug
from vtorque_core.plugins import Plugins
from vtorque_core.policy import check_share, decide, needs
from vtorque_core.request import make_request, requested

DRY_RUN = "--dry-run"

USAGE = """\
Usage: vsub [options of your batch system's submit command] [-vm KEY=VALUE[,...]] SCRIPT

Submit a job script that runs inside a virtual machine, as yourself, with your home directory,
output files and exit code as of any other job.

  -vm KEY=VALUE[,...]  what the virtual machine should be like; may be repeated
  -vm none             run on bare metal, as the batch system alone would
  --dry-run            show plan and virtual hardware, submit nothing
  -h, --help           this text

A script may carry the same in lines "#VSUB -vm KEY=VALUE"; the command line wins.
"""


def main() -> NoReturn:
    """Entry point of the command."""
    try:
        code = submit(sys.argv[1:])
    except VtorqueError as error:
        sys.stderr.write(f"vsub: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def submit(argv: Sequence[str]) -> int:
    """Do what the command line says; return the exit code.

    Raises Refused or UsageError, with nothing created.
    """
    site, plugins = load_for_user()
    if {"-h", "--help"} & set(argv[:1]):
        sys.stdout.write(help_text(site, plugins))
        return 0
    submitter = plugins.batch_system(site.batch.system).submitter(site)
    args = submitter.split([arg for arg in argv if arg != DRY_RUN])
    pairs = requested(args.vm, args.directives)
    if pairs is None or (not pairs and not site.batch.vm_by_default):
        if DRY_RUN in argv:
            sys.stdout.write("bare metal: no virtual machine\n")
            return 0
        return submitter.submit(args, None, None)
    request = make_request(pairs, plugins.options(), args.shell)
    wanted = decide(request, site, plugins)
    debug("vsub", "%s: batch system %s, asked for: %s", site.path, site.batch.system, pairs)
    check_image(wanted, site, plugins, args.content)
    needed = needs(wanted, site, plugins, disk_in_memory(wanted, site))
    debug("vsub", "on each node: %d CPUs, %d MiB", needed.cpus, needed.mib)
    check_share(needed, args.vcpus_given, args.mib_given)
    if DRY_RUN in argv:
        from vtorque_core.cli.dry_run import show  # noqa: PLC0415

        return show(request, site.path)
    if wanted[SHOW_LOG] and not args.interactive:
        from vtorque_core.cli.follow import submit_and_follow  # noqa: PLC0415

        return submit_and_follow(submitter, args, request.encode(), needed, site)
    return submitter.submit(args, request.encode(), needed)


def check_image(
    wanted: JobRequest, site: Site, plugins: Plugins, script: bytes | None = None
) -> None:
    """Refuse at once what the node would refuse later, where this host can see the pool."""
    if os.access(site.images.pool, os.R_OK | os.X_OK):
        image = select(site.images.pool, wanted[IMG], wanted[DISTRO], wanted[ARCH])
        check = plugins.guest_type(image.guest_type).check_script
        refusals = tuple(check(script, image)) if check is not None and script is not None else ()
        if refusals:
            raise Refused(*refusals)


def disk_in_memory(wanted: JobRequest, site: Site) -> int:
    """Return MiB of a guest's root disk in memory; 0: on a disk, or this host sees no image."""
    pool = site.images.pool
    if wanted[FS_TYPE] != "ramdisk" or not os.access(pool, os.R_OK | os.X_OK):
        return 0
    image = select(pool, wanted[IMG], wanted[DISTRO], wanted[ARCH])
    readable = image.disk is not None and os.access(image.disk, os.R_OK)
    return ramdisk_mib(image.disk) if image.disk is not None and readable else 0


def help_text(site: Site, plugins: Plugins) -> str:
    """Return the usage with every registered ``-vm`` key, its default here and its limits."""
    lines = [USAGE, "Keys of -vm at this site:"]
    for key, option in sorted(plugins.options().items()):
        limits = site.options.get(key, Limits())
        shown = option.show(effective_default(option, limits))
        lines.append(f"  {key}={option.metavar}")
        lines.append(f"      {option.help} (default: {shown or 'none'}{bounds(option, limits)})")
    return "\n".join(lines) + "\n"


def bounds(option: Option[Any], limits: Limits) -> str:
    """Return the site's limits of a key as ``; min 1; max 8``, or nothing."""
    found = [(n, getattr(limits, n)) for n in ("min", "max")]
    text = "".join(f"; {name} {option.show(value)}" for name, value in found if value is not None)
    if limits.allow is not None:
        text += "; one of " + ", ".join(rule.text for rule in limits.allow)
    if limits.deny:
        text += "; not " + ", ".join(rule.text for rule in limits.deny)
    return text
