"""Start a job's guests on this node, and journal each phase. As root in the prologue."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from vtorque_core.api import hooks
from vtorque_core.api.batch_system import BatchJob, Detach, NodeAdapter
from vtorque_core.api.boot_source import BootSource
from vtorque_core.api.claims import Notice, Placement
from vtorque_core.api.guest_driver import DetachableDriver, LateDriver, ReadyGuest
from vtorque_core.api.guest_plan import JobUser
from vtorque_core.api.job_files import File
from vtorque_core.api.kept_records import keep_facts
from vtorque_core.api.libvirt_domain import Filesystem, find_forbidding
from vtorque_core.api.values import Act, JobRequest
from vtorque_core.api.vm_options import KEEP, LOG, SHOW_LOG, VM_EPILOGUE, VM_PROLOGUE
from vtorque_core.base.errors import HostFault, InUse, Refused
from vtorque_core.base.names import JobAttempt
from vtorque_core.config import policy
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.request import read as read_request
from vtorque_core.config.site_config import Site
from vtorque_core.node.shell import proof
from vtorque_core.node.shell.proof import Proof
from vtorque_core.node.start.attempt import StartAttempt
from vtorque_core.plan import guests as plan
from vtorque_core.plan.guests import GuestSpec, PlannedGuest
from vtorque_core.plan.job_context import JobContext, attempt_of, job_user, load_secret, node_share
from vtorque_core.plan.placement import ledger
from vtorque_core.plan.placement.model import NodeShare
from vtorque_core.records import log, timeline
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, JournalError, read

# Phases that the user cannot disturb. Later on, the user can break a disk, kill the daemons of
# shares or make the guest hang.
_NODES_OWN = ("plan", "render domain")
_REAPED = 30  # ended jobs are reaped at every 30th attempt
_AGAIN = 1.0  # seconds between two attempts, because each one reads all journals
_log = logging.getLogger(__name__)


def proof_file(told: Proof, user: JobUser, site: Site) -> File:
    path = str(site.paths.proof(told.job.id))
    return File(path, mode=0o640, gid=user.gid, replace=True, content=told.encode())


def header(attempt: JobAttempt, job: BatchJob, site: Site, plugins: Plugins) -> JobHeader:
    return JobHeader(
        job=attempt,
        batch=site.batch.system,
        plugins={name: plugins.distributions[name] for name in plugins.names},
        whole_node=job.whole_node,
        ending=tuple(n for n in plugins.names if "vtorque_teardown" in plugins.hooks_of(n)),
        off=tuple(plugins.withheld),
    )


def start_job(
    job: BatchJob,
    site: Site,
    plugins: Plugins,
    adapter: NodeAdapter,
    reap_gone: Callable[[], None] = lambda: None,
    let_hook_return: Callable[[], None] = lambda: None,
    arriving: Sequence[BootSource] = (),
) -> None:
    """Boot all guests of the job on this node and write the ready proof.

    If resources are in use, calls ``reap_gone``, which releases those of ended jobs. Calls
    ``let_hook_return`` when the hook may return (:class:`Detach`). ``arriving`` are boot sources of
    guests that migrate to this node.
    """
    assert job.blob is not None  # noqa: S101 - checked by the caller
    if job.bad_request:
        raise Refused(job.bad_request)
    if job.unknown:
        raise HostFault(f"the batch system does not report all data of the job: {job.unknown}")
    request = read_request(job.blob)
    user = job_user(job.owner, site)
    facts = policy.facts_of_job(job, user)
    policy.require_facts(site, facts)
    site, plugins = policy.for_job(site, plugins, facts)
    wanted = replace(policy.check_options(request, site, plugins), nodes=len(job.nodes))
    log.apply_request(wanted[LOG])
    _log.debug("requested: %s", " ".join(sorted(wanted.given)) or "nothing")
    attempt = attempt_of(job, user)
    with Journal.start(site.paths, header(attempt, job, site, plugins)) as journal:
        deadline = time.monotonic() + site.node.start_timeout
        start = StartAttempt(attempt, user, site, deadline, journal, plugins)
        with excuse_node(start):
            _start(start, job, wanted, adapter, reap_gone, let_hook_return, arriving)


@contextlib.contextmanager
def excuse_node(start: StartAttempt) -> Iterator[None]:
    """Do not blame the node for a HostFault in a phase that users can disturb.

    The node then still gets VM jobs (``HostFault.blames_node``). Replaces the HostFault by Refused
    if a guest with the user's own image does not become ready.
    """
    try:
        yield
    except HostFault as error:
        if start.phase not in _NODES_OWN:
            error.blames_node = False
        if start.phase == "ready" and any(guest.image.source for guest in start.guests):
            refused = Refused(f"the guest with your own image did not become ready: {error}")
            refused.detail = error.detail
            raise refused from error
        raise


def _start(
    start: StartAttempt,
    job: BatchJob,
    wanted: JobRequest,
    adapter: NodeAdapter,
    reap_gone: Callable[[], None],
    let_hook_return: Callable[[], None],
    arriving: Sequence[BootSource],
) -> None:
    site = start.site
    told = _proof(start, job, wanted)
    start.acquire(proof_file(told, start.user, site))
    if job.detach is Detach.AT_ONCE:
        let_hook_return()
    start.enter("plan")
    secret = load_secret(site.paths.secret)
    share = node_share(job, site)
    of_node = (share.machine, share.granted)
    context = JobContext(job, start.user, site, start.plugins, secret, *of_node)
    planned = plan.plan_guests(context, wanted, arriving)
    patience = site.node.start_timeout / 2 if job.patience is None else job.patience
    placements, evicted = _place_guests(start, planned, share, reap_gone, let_hook_return, patience)
    let_hook_return()
    # The batch system waits until here. These modules take 0.1 s of CPU time to import.
    from vtorque_core.node.start import boot, guest_resources, spare  # noqa: PLC0415

    _free_cores(placements)
    start.guests = plan.place_guests(context, planned, placements)
    notices = plan.placement_notices(planned, placements)
    plan.log_plan(start.guests, notices)

    start.enter("render domain")
    of_batch = functools.partial(adapter.context, job)
    rendered = plan.prepare_guests(context, start.guests, planned, of_batch)
    prepared = [
        replace(each, resources=tuple(each.driver.resources(each.plan, each.items, site)))
        for each in spare.apply_offers(start, rendered, evicted)
    ]
    start.guests = [each.plan for each in prepared]
    _keep_facts(start, job, wanted, prepared)

    def while_booting() -> None:
        if job.placed is not None:
            os.eventfd_write(job.placed, 1)
        start.call_hook(hooks.vtorque_while_booting)

    if job.placed is not None and any(each.plan.source.warm_key for each in prepared):
        os.eventfd_write(job.placed, 1)  # earlier, because QEMU runs already
    on_order = isinstance(prepared[0].driver, LateDriver)
    start.enter("pre-boot")
    boots = [] if on_order else boot.guest_boots(start, prepared)
    guest_resources.acquire_all(start, prepared, meanwhile=lambda: [b.rendered for b in boots])
    _acquire_user_files(start, wanted)
    start.call_hook(hooks.vtorque_pre_boot)

    if on_order:
        boot.boot_on_order(start, prepared)
        while_booting()
    else:
        boot.boot_all(start, boots, booting=while_booting)  # phases boot, ready, post-boot
    _prove_ready(start, told, prepared[0], notices)
    start.enter("await the script" if on_order else "run")
    with contextlib.suppress(JournalError, OSError):  # the owner cannot read the journal
        phases = timeline.spans(read(start.journal.path), time.time())
        keep_facts(site.paths, start.job, phases=phases)


def _place_guests(
    start: StartAttempt,
    planned: Sequence[PlannedGuest],
    share: NodeShare,
    reap_gone: Callable[[], None],
    let_hook_return: Callable[[], None],
    seconds: float,
) -> tuple[list[Placement], list[str]]:
    """Place the guests; also return the keys of warm guests whose memory the job needs.

    If resources are in use, reaps ended jobs and retries for ``seconds``. First calls
    ``let_hook_return``, because the batch system must not be blocked.
    """
    claims = [one.claims for one in planned]
    guests = [one.plan for one in planned]

    until = time.monotonic() + seconds
    looks = 0
    while True:
        plugins = start.plugins.withhold({})  # includes those disabled for this job
        found = plugins.collect(hooks.vtorque_reserved_items, guests=guests, site=start.site)
        away = [each.item for each in found]  # before the lock in place(), which plugins may need
        try:
            return ledger.place(start.journal, claims, share, start.site.paths, away)
        except InUse as error:
            if looks and time.monotonic() >= until:
                raise
            if seconds:
                let_hook_return()
            if looks % _REAPED == 0:
                _log.info("%s", error)
                reap_gone()
            else:
                time.sleep(_AGAIN)
            looks += 1


def _free_cores(placements: Sequence[Placement]) -> None:
    helpers = {cpu for at in placements for cpu in at.cores["emulator"]}
    if helpers:
        os.sched_setaffinity(0, helpers)


def _keep_facts(
    start: StartAttempt, job: BatchJob, wanted: JobRequest, prepared: Sequence[GuestSpec]
) -> None:
    guests = [
        {"rank": g.rank, "index": g.index, "hostname": g.hostname, "domain": g.name}
        | {"vcpus": g.vcpus, "ram_mib": g.ram_mib}
        for g in start.guests
    ]
    image, known = start.guests[0].image, start.guests[0].source.identity
    keep_facts(
        start.site.paths,
        start.job,
        nodes=list(job.nodes),
        name=job.name,
        known_as=job.known_as,
        batch=start.site.batch.system,
        image=image.name,
        image_sha256=image.sha256,
        guest_type=image.guest_type,
        started=time.time(),
        guests=guests,
        given=sorted(wanted.given),
        walltime=job.resource_list.get("walltime", ""),
        unsaveable=_why_unsaveable(prepared),
        immovable=_types_without("migrate", prepared),
        booted_for=[known.job_id, known.attempt] if known else [job.id, job.attempt],
        **log.facts(),
    )


def _why_unsaveable(prepared: Sequence[GuestSpec]) -> list[str]:
    stay = (each for each in prepared if not isinstance(each.driver, DetachableDriver))
    kinds = sorted({f"guests of type {each.plan.image.guest_type}" for each in stay})
    return [*_types_without("save", prepared), *kinds]


def _types_without(act: Act, prepared: Sequence[GuestSpec]) -> list[str]:
    elements = (item.element for each in prepared for item in each.merged.items)
    found = find_forbidding(act, elements)
    if Filesystem.__name__ in found:
        from vtorque_core.resources import virtiofs_daemon  # noqa: PLC0415 - after the hook

        found.remove(Filesystem.__name__)
        if not virtiofs_daemon.can_save():
            found.append("shared directories (this virtiofsd cannot save its state)")
    return found


def _proof(start: StartAttempt, job: BatchJob, wanted: JobRequest) -> Proof:
    return Proof(
        job=start.job,
        state="starting",
        deadline=start.deadline,
        starter=os.getpid(),
        namespace=proof.pid_namespace(),
        nodes=job.nodes,
        grace=start.site.node.grace,
        shell=wanted.shell,
        files={name: proof.digest(content) for name, content in _user_files(wanted).items()},
        off=tuple(start.plugins.withheld),
        keep=wanted[KEEP],
        show_log=wanted[SHOW_LOG],
    )


def _user_files(wanted: JobRequest) -> dict[str, bytes]:
    found = zip(proof.USER_FILES, (wanted[VM_PROLOGUE], wanted[VM_EPILOGUE]), strict=True)
    return {name: file.content for name, file in found if file is not None}


def _acquire_user_files(start: StartAttempt, wanted: JobRequest) -> None:
    for name, content in _user_files(wanted).items():
        path = proof.user_file_path(start.site.paths, start.job, name)
        start.acquire(File(str(path), mode=0o400, reader=start.user.uid, content=content))


def _prove_ready(
    start: StartAttempt, told: Proof, first: GuestSpec, notices: Sequence[Notice]
) -> None:
    detail = dict.fromkeys((*(each.text for each in notices), *start.warnings))
    guests = (ReadyGuest(g.name, g.hostname, g.rank, g.run_dir, g.image.name) for g in start.guests)
    ready = replace(
        told,
        state="ready",
        guest_type=first.plan.image.guest_type,
        plugin=first.owner,
        environ={"HOME": first.plan.home, **first.environ},
        unless=first.unless,
        detail=tuple(detail),
        guests=tuple(guests),
    )
    proof.write(start.site.paths, ready, gid=start.user.gid)
