"""``vsub``: the site's submit command with ``-vm key=value[,key=value...]``. As the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from vtorque_core.api.strategies import GuestType
from vtorque_core.api.values import Image, JobRequest, Option
from vtorque_core.api.vm_options import IMG, RAM, is_own_image
from vtorque_core.base.errors import Refused
from vtorque_core.base.names import CONFIG_PATH
from vtorque_core.cli.entry import forget_coerced_locale, report_errors, split_config
from vtorque_core.config import policy
from vtorque_core.config.job_size import JobGrant
from vtorque_core.config.load import load
from vtorque_core.config.option_limits import Limits, effective_default, show_limits
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import check_options
from vtorque_core.config.request import make_request, merge_pairs
from vtorque_core.config.site_config import Site
from vtorque_core.images.pool import ramdisk_mib, select_image

DRY_RUN = "--dry-run"
NO_PULL = "--no-pull"

USAGE = """\
Usage: vsub [options of your batch system's submit command] [-vm KEY=VALUE[,...]] SCRIPT

Submit a job script that runs in a virtual machine, as you, with your home directory. Output files
and exit code are those of an ordinary job.

  -vm KEY=VALUE[,...]  set properties of the virtual machine; repeatable
  -vm none             run on bare metal, without a virtual machine
  --dry-run            show plan and virtual hardware, submit nothing
  --no-pull            do not copy your own image: use the copy in your cache
  --config FILE        use another site config than /etc/vtorque/vtorque.toml; the first argument
  -h, --help           show this text

Lines "#VSUB -vm KEY=VALUE" in the script do the same. The command line takes precedence.
"""


def main() -> NoReturn:
    forget_coerced_locale()
    with report_errors("vsub"):
        sys.exit(submit(sys.argv[1:]))


def submit(argv: Sequence[str]) -> int:
    config, argv = split_config(argv)
    site, plugins = load(config, node=False)
    if {"-h", "--help"} & set(argv[:1]):
        sys.stdout.write(help_text(site, plugins))
        return 0
    installed_by_user = os.geteuid() != 0 and Path(sys.prefix).stat().st_uid == os.geteuid()
    if installed_by_user and config == CONFIG_PATH and not site.owner:
        # Such a user may expect a personal site.
        sys.stderr.write(f"vsub: using the site config {site.path}\n")
    submitter = plugins.batch_system(site.batch.system).submitter(site)
    args = submitter.split([arg for arg in argv if arg not in (DRY_RUN, NO_PULL)])
    pairs = merge_pairs(args.vm, args.directives)
    if pairs is None or (not pairs and not site.batch.vm_by_default):
        if DRY_RUN in argv:
            sys.stdout.write("bare metal: no virtual machine\n")
            return 0
        return submitter.submit(args, None, None)
    request = make_request(pairs, plugins.options(), args.shell)
    facts = policy.facts_of_user() if site.limits else {}
    facts |= {name: (value,) for name, value in args.facts.items()}
    site, plugins = policy.for_job(site, plugins, facts)
    wanted = check_options(request, site, plugins)
    base = wanted[IMG]
    if is_own_image(base):
        own = policy.own_images(base, plugins)
        base, changed = own.base(base), own.resolve(wanted, site, NO_PULL not in argv)
        kept = [pair for pair in request.pairs if pair[0] not in changed]
        request = replace(request, pairs=(*kept, *changed.items()))
        wanted = check_options(request, site, plugins)
    wanted = replace(wanted, nodes=args.nodes_given)
    if site.owner:
        from vtorque_core.cli.first_job import prepare  # noqa: PLC0415 - personal sites only

        prepare(site, base)
    image = visible_image(wanted, site, plugins)
    if image is not None:
        check_script(plugins.guest_type(image.guest_type), args.content, image)
    granted = JobGrant(args.vcpus_given, args.mib_given)
    disk = disk_in_memory(wanted, image)
    wanted, _ = policy.resolve(wanted, site, plugins, granted, image, disk)
    needed = policy.needs(wanted, site, plugins, disk)
    policy.check_share(needed, args.vcpus_given, args.mib_given, args.resources_given)
    if DRY_RUN in argv:
        for name, number in (*needed.resources.items(), *needed.licenses.items()):
            sys.stdout.write(f"<!-- asks the batch system for {name} = {number} -->\n")
        from vtorque_core.cli.dry_run import show  # noqa: PLC0415 - few submissions

        return show(request, site.path, granted, facts)
    if RAM.key in wanted.of_job and args.vcpus_given is not None and args.mib_given is None:
        needed = replace(needed, mib=None)  # guests get the job's memory
    return submitter.submit(args, request.encode(), needed)


def visible_image(wanted: JobRequest, site: Site, plugins: Plugins) -> Image | None:
    if not os.access(site.images.pool, os.R_OK | os.X_OK):
        return None
    return select_image(wanted, site, plugins)


def check_script(guest_type: GuestType, script: bytes | None, image: Image) -> None:
    check = guest_type.check_script
    if check and script is not None and (refusals := tuple(check(script, image))):
        raise Refused(*refusals)


def disk_in_memory(wanted: JobRequest, image: Image | None) -> int:
    if image is None or image.disk is None or not os.access(image.disk, os.R_OK):
        return 0
    return ramdisk_mib(wanted, image)


def help_text(site: Site, plugins: Plugins) -> str:
    lines = [USAGE, "Keys of -vm at this site:"]
    for key, option in sorted(plugins.options().items()):
        limits = site.options.get(key, Limits())
        default = option.show(effective_default(option, limits)) or "none"
        lines.append(f"  {key}={option.metavar}")
        lines.append(f"      {option.help} (default: {default}{show_bounds(option, limits)})")
    if site.limits:
        lines.append("Not all jobs have these limits: see vtorque config explain --as USER")
    return "\n".join(lines) + "\n"


def show_bounds(option: Option[Any], limits: Limits) -> str:
    words = {"allow": "one of", "deny": "not"}
    return "".join(
        f"; {words.get(name, name)} {value if isinstance(value, str) else ', '.join(value)}"
        for name, value in show_limits(option, limits).items()
    )


if __name__ == "__main__":
    main()
