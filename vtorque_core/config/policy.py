"""Apply the site's policy to a request, early in ``vsub`` and finally on the node."""

from __future__ import annotations

import grp
import os
import pwd
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vtorque_core.api import hooks
from vtorque_core.api.batch_system import Needs
from vtorque_core.api.values import FileData, Image, JobRequest, Option
from vtorque_core.api.vm_options import IMG, RAM, VCPUS, VMS_PER_NODE, is_own_image
from vtorque_core.base.errors import HostFault, Refusal, Refused, VtorqueError, plugin_text
from vtorque_core.config import job_size, personal
from vtorque_core.config.job_limits import ALWAYS_THERE, OF_BATCH, Entry, Facts
from vtorque_core.config.job_size import JobGrant
from vtorque_core.config.option_limits import Limits, effective_default, refusal
from vtorque_core.config.request import Request, unknown_key

if TYPE_CHECKING:
    from vtorque_core.api.batch_system import BatchJob
    from vtorque_core.api.guest_plan import JobUser
    from vtorque_core.api.strategies import ImageSource
    from vtorque_core.config.plugins import Plugins
    from vtorque_core.config.site_config import Site


def facts_of_job(job: BatchJob, user: JobUser) -> Facts:
    told = {name: (str(getattr(job, name)),) for name in OF_BATCH}
    return {**told, "user": (user.name,), "group": tuple(name for name, _ in user.groups)}


def facts_of_user(name: str = "") -> dict[str, tuple[str, ...]]:
    """Return a user's name and groups, the facts known before submission.

    Empty ``name``: the caller.
    """
    account = pwd.getpwnam(name) if name else personal.account()
    groups = groups_of(account.pw_name, account.pw_gid)
    return {"user": (account.pw_name,), "group": tuple(name for name, _ in groups)}


def groups_of(user: str, gid: int) -> tuple[tuple[str, int], ...]:
    gids = [gid, *(other for other in os.getgrouplist(user, gid) if other != gid)]
    return tuple((_group_name(each), each) for each in gids)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"g{gid}"


def for_job(site: Site, plugins: Plugins, facts: Facts) -> tuple[Site, Plugins]:
    """Return the site config and the plugins for one job.

    If a fact is unknown, an entry of ``[[limits]]`` that uses the fact refuses nothing.
    """
    off: dict[str, str] = {}
    for entry, surely in _applicable(site, facts):
        for name, on in entry.plugins.items():
            if on:
                off.pop(name, None)
            elif surely:
                off[name] = site.place(f"limits.{entry.number}.plugins.{name}")
    return replace(site, options=options_for(site, facts)), plugins.withhold(off)


def options_for(site: Site, facts: Facts) -> dict[str, Limits]:
    options = dict(site.options)
    for entry, surely in _applicable(site, facts):
        for key, limits in entry.options.items():
            options[key] = options[key].override(limits, surely=surely)
    return options


def _applicable(site: Site, facts: Facts) -> Iterator[tuple[Entry, bool]]:
    """Yield the entries that apply or may apply to a job, with True for those that surely apply."""
    for entry in site.limits:
        counts = applies(entry, facts)
        if counts is not False:
            yield entry, bool(counts)


def applies(entry: Entry, facts: Facts) -> bool | None:
    """Return True if an entry of ``[[limits]]`` applies to a job; None if this is unknown."""
    found = [_matches(facts.get(name), wanted) for name, wanted in entry.jobs.items()]
    return False if False in found else None if None in found else True


def _matches(has: tuple[str, ...] | None, wanted: Iterable[str]) -> bool | None:
    if has is None:
        return None
    return any(fnmatchcase(name, each) for name in has for each in wanted)


def require_facts(site: Site, facts: Facts) -> None:
    """Raise HostFault if ``[[limits]]`` uses a fact that the batch system's hook did not report."""
    for entry in site.limits:
        for name in ALWAYS_THERE:
            if name in entry.jobs and facts[name] == ("",):
                raise HostFault(
                    f"the batch system's hook does not report the job's {name}, which {entry} in "
                    f"{site.path} uses: run vtorque setup install"
                )


def decide(request: Request, site: Site, plugins: Plugins) -> JobRequest:
    return resolve(check_options(request, site, plugins), site, plugins)[0]


def resolve(
    wanted: JobRequest,
    site: Site,
    plugins: Plugins,
    granted: JobGrant = JobGrant(),
    image: Image | None = None,
    disk: int = 0,
) -> tuple[JobRequest, list[str]]:
    """Call :func:`job_size.resolve` and ``vtorque_parse_args``. Raises Refused."""
    job, notes, refusals = job_size.resolve(wanted, site, plugins, granted, image, disk)
    refusals = refusals or _parse_args(job, site, plugins)
    if refusals:
        raise Refused(*refusals)
    return job, notes


WITHOUT_ROOT = ", but your personal site runs without root (doc/laptop.md)"


def _unloaded_hint(site: Site, plugins: Plugins) -> str:
    key = "disable" if site.plugins.disable else "enable"
    off = f"are disabled on this site by {site.origin(f'plugins.{key}')}"
    reasons = {"could not be loaded here": sorted(plugins.broken), off: plugins.off}
    found = ((why, ", ".join(names)) for why, names in reasons.items() if names)
    return "".join(f" (plugins that {why}: {names})" for why, names in found)


def check_options(request: Request, site: Site, plugins: Plugins) -> JobRequest:
    """Return the request with a typed value for every option, within the site's limits.

    ``ram`` and ``vcpus`` may still be JOB (``job``). Raises Refused with all refusals.
    """
    try:
        options = plugins.options()
    except VtorqueError as error:
        raise Refused(plugin_text(str(error))) from None
    values = {
        key: effective_default(option, site.options.get(key, Limits()))
        for key, option in options.items()
    }
    refusals: list[Refusal] = []
    given: set[str] = set()
    everything: list[tuple[str, str | FileData]] = [*request.pairs, *request.files.items()]
    for key, value in everything:
        shown = value.name if isinstance(value, FileData) else value
        problem: Refusal | None
        if key not in options:
            problem = unknown_key(key, shown, options, _unloaded_hint(site, plugins))
            if why := plugins.why_withheld(hooks.vtorque_options, key):
                problem = replace(problem, message=why, fix=None)
        elif key in given:
            problem = Refusal("is given twice", key=key, value=shown)
        else:
            given.add(key)
            values[key], problem = _value(options[key], value, shown, site, plugins)
        if problem is not None:
            refusals.append(problem)
    for key in options:
        problem = None if key in given else _bad_default(options[key], values[key], site, plugins)
        refusals += [problem] if problem else []
    forbids = {key: each.forbids for key, each in options.items() if values[key] and each.forbids}
    needs = (each.needs for key, each in options.items() if values[key] != each.default)
    job = JobRequest(
        MappingProxyType(values),
        frozenset(given),
        request.shell,
        forbids=MappingProxyType(forbids),
        needs=frozenset().union(*needs),
    )
    if refusals:
        raise Refused(*refusals)
    if is_own_image(image := values.get(IMG.key) or ""):
        own_images(image, plugins)
    return job


def own_images(value: str, plugins: Plugins) -> ImageSource:
    """Return the source of users' own images. Raises Refused if this site has none."""
    found = plugins.image_sources()
    if not found:
        raise Refused(
            "is your own image, which this site does not accept",
            key=IMG.key,
            value=value,
            fix="write the name of an image in the pool (vmgr images list)",
        )
    return found[0]


def _value(
    option: Option[Any], asked: str | FileData, shown: str, site: Site, plugins: Plugins
) -> tuple[Any, Refusal | None]:
    key = option.key
    is_file = option.is_file if isinstance(asked, FileData) else option.names_file(asked)
    if is_file != isinstance(asked, FileData):
        kind = "the content of a file, not its name" if option.is_file else "text, not a file"
        return None, Refusal(f"the value must be {kind}", key=key, value=shown)
    try:
        value = asked if isinstance(asked, FileData) else option.parse(asked)
    except ValueError as error:
        return None, Refusal(plugin_text(error), key=key, value=shown)
    except (Exception, SystemExit) as error:
        return None, _parse_failure(option, shown, error, plugins)
    return value, _refusal(option, value, shown, site, plugins)


def _refusal(
    option: Option[Any], value: Any, shown: str, site: Site, plugins: Plugins
) -> Refusal | None:
    limits = site.options.get(option.key, Limits())
    try:
        if site.owner and option.needs_root(value):
            return Refusal(f"needs root{WITHOUT_ROOT}", key=option.key, value=shown)
        return refusal(option, limits, value, shown, site.place)
    except (Exception, SystemExit) as error:
        return _parse_failure(option, shown, error, plugins)


def _bad_default(option: Option[Any], value: Any, site: Site, plugins: Plugins) -> Refusal | None:
    set_by = site.options.get(option.key, Limits()).set_by
    if not site.limits or not set_by or value is None or value == "":
        return None
    problem = _refusal(option, value, option.show(value), site, plugins)
    by = set_by.get("default")
    said = f"that is the default, set by {site.place(by) if by else 'its plugin'}"
    return problem and replace(problem, fix=f"{said}: name another value, and tell the admin")


def _parse_args(job: JobRequest, site: Site, plugins: Plugins) -> list[Refusal]:
    found = []
    for contribution in plugins.each(hooks.vtorque_parse_args, request=job, site=site):
        error = contribution.error
        if isinstance(error, Refused):
            found += [_one_line(r) for r in error.refusals]
        elif error is not None:
            found.append(contribution.failure("vtorque_parse_args"))
        else:
            found.append(_one_line(contribution.item))
    return found


def _one_line(refused: Refusal) -> Refusal:
    parts = {part.name: getattr(refused, part.name) for part in fields(Refusal)}
    said = {n: plugin_text(p) for n, p in parts.items() if p is not None}
    return Refusal(**({"message": ""} | said))


def _parse_failure(
    option: Option[Any], shown: str, error: BaseException, plugins: Plugins
) -> Refusal:
    owners = [c.plugin for c in plugins.each(hooks.vtorque_options) if c.item is option]
    before = f"plugin {', '.join(owners)} failed to parse it: {type(error).__name__}: "
    return Refusal(plugin_text(error, before), key=option.key, value=shown)


def needs(wanted: JobRequest, site: Site, plugins: Plugins, disk: int = 0) -> Needs:
    more, of_job = job_size.extras(wanted, site, plugins), wanted.of_job
    cpus = wanted[VMS_PER_NODE] * wanted[VCPUS] + sum(e.cpus for e in more)
    mib = job_size.total_memory(wanted, site, more, disk)
    # Not for guests of the job's size: they would get the host's reserve, too.
    if VCPUS.key not in of_job or any(e.own for e in more):
        cpus += site.node.host_reserve_cores
    if RAM.key not in of_job:
        mib += site.node.host_reserve_ram
    resources, licenses = Counter[str](), Counter[str]()
    for each in more:
        resources.update(each.resources)
        licenses.update(each.licenses)
    return Needs(cpus, mib, round(site.batch.boot_walltime), resources, licenses)


def check_share(
    needed: Needs,
    cpus: int | None,
    mib: int | None,
    resources: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Refuse a job that requests less from the batch system than its guests need.

    All numbers are per node; None: not requested.
    """
    fix = "request more, or fewer or smaller guests, or nothing: vsub adds what guests need"
    shares = [(needed.cpus, cpus, "CPUs"), (needed.mib, mib, "MiB of memory")]
    for name, need in (*needed.resources.items(), *needed.licenses.items()):
        shares.append((need, resources.get(name), name))
    refusals = [
        Refusal(f"the guests of a node need {need} {unit}, but the job requests {given}", fix=fix)
        for need, given, unit in shares
        if given is not None and need is not None and given < need
    ]
    if refusals:
        raise Refused(*refusals)
