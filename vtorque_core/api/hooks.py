"""The plugin API: every hook, in life-cycle order.

Contributions return typed data and have no side effects; actions run once per job and node, as
root, in one thread, in the sorted order of plugin names. There is no firstresult, no ordering
request and no wrapper. A raising plugin is named and never stops another's hook; what it costs
the job is said with each hook. A hook is a function under ``hookimpl``, or ``always(...)`` if it
takes nothing and its answer never changes. Every example below is run by a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vtorque_core.api.values import hookspec

if TYPE_CHECKING:
    from pathlib import Path

    import click

    from vtorque_core.api.acquired import Resource
    from vtorque_core.api.batch_system import BatchJob, JobInfo, JobOnNode
    from vtorque_core.api.claims import Claim, Notice, PoolClaim
    from vtorque_core.api.guest_context import ContextItem
    from vtorque_core.api.guest_plan import GuestPlan, JobUser, SavedGuest
    from vtorque_core.api.health import HealthCheck
    from vtorque_core.api.kept_records import Place
    from vtorque_core.api.libvirt_domain import Element
    from vtorque_core.api.node_job import EndedJob, NodeJob, Site
    from vtorque_core.api.setup_steps import Installation, SetupStep
    from vtorque_core.api.strategies import BatchSystem, Command, GuestType, ImageBuilder, OfJob
    from vtorque_core.api.values import Extra, Image, JobRequest, Option
    from vtorque_core.base.errors import Refusal
    from vtorque_core.base.names import JobAttempt

# -- set up -----------------------------------------------------------------------------------


@hookspec
def vtorque_settings() -> Iterable[type[Any]]:
    """Return the frozen dataclass that is this plugin's ``[plugin.<name>]`` table.

    In either module; called whenever the site config is read. Raising leaves the plugin out and
    reports it.

    Example::

        from dataclasses import dataclass
        from vtorque_core.api import always, setting

        @dataclass(frozen=True)
        class Settings:
            cards: tuple[str, ...] = setting((), doc="PCI addresses of this node's cards")

        vtorque_settings = always(Settings)
    """
    return ()


@hookspec
def vtorque_guest_types() -> Iterable[GuestType]:
    """Return the guest types this plugin brings. Declaring module; any user.

    Two plugins with the same name are refused, naming both. Raising leaves the plugin out.

    Example::

        from vtorque_core.api import GuestType, always

        def driver():
            from acme.node import AcmeDriver
            return AcmeDriver()

        ACME = GuestType("acme", supports=frozenset({"EnvVar"}), driver=driver)
        vtorque_guest_types = always(ACME)
    """
    return ()


@hookspec
def vtorque_batch_systems() -> Iterable[BatchSystem]:
    """Return the batch systems this plugin brings. Declaring module; any user.

    The site chooses one with ``[batch] system``. Raising leaves the plugin out.

    Example::

        from vtorque_core.api import BatchSystem, always

        def submitter(site):
            from acme.submit import AcmeSubmitter
            return AcmeSubmitter(site)

        ACME = BatchSystem("acme", submitter=submitter, node=..., shell=...)
        vtorque_batch_systems = always(ACME)
    """
    return ()


@hookspec
def vtorque_image_builders() -> Iterable[ImageBuilder]:
    """Return the image builders this plugin brings. Declaring module; used by ``vmgr images``.

    Raising leaves the plugin out.

    Example::

        from vtorque_core.api import ImageBuilder, always

        def builder():
            from acme.build import AcmeBuilder
            return AcmeBuilder()

        vtorque_image_builders = always(ImageBuilder("acme", "an Acme appliance", builder=builder))
    """
    return ()


@hookspec
def vtorque_commands() -> Iterable[Command]:
    """Return click commands of ``vmgr``, ``vtorque`` or a group of theirs: ``"vmgr images sync"``.

    Declaring module; never used by vsub. A command of the core's of the same name stays.
    Raising leaves the plugin out.

    Example::

        from vtorque_core.api import Command, always

        def cards():
            import click
            return click.Command("cards", help="List the Acme cards.")

        vtorque_commands = always(Command("vmgr cards", load=cards))
    """
    return ()


@hookspec
def vtorque_elsewhere(
    command: click.Command, of_job: OfJob, config: Path
) -> Iterable[click.Command]:
    """Return what is called in place of a command about a job: it may run where the job does.

    Declaring module; in ``vmgr``, for a command whose ``Command.of_job`` is set, as the calling
    user, with the site config in use. Raising leaves the command out.

    Example::

        import click
        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_elsewhere(config):
            def rsh(words):
                click.echo(f"acme-rsh {config}: {' '.join(words)}")
            words = click.Argument(["words"], nargs=-1)
            yield click.Command("ssh", callback=rsh, params=[words])
    """
    return ()


@hookspec
def vtorque_resources() -> Iterable[type[Resource]]:
    """Return the resource kinds this plugin acquires, so that teardown can release them.

    Acting module; root on the node. Raising refuses the jobs that need this plugin.

    Example::

        from dataclasses import dataclass
        from vtorque_core.api import always
        from vtorque_core.api import run_tool
        from vtorque_core.api.acquired import Resource

        @dataclass(frozen=True)
        class Shell(Resource):
            kind = "acme-shell"
            card: str

            def create(self):
                run_tool("acme-load", self.card)
            def release(self):
                run_tool("acme-load", self.card, "--blank")

        vtorque_resources = always(Shell)
    """
    return ()


@hookspec
def vtorque_health_checks() -> Iterable[HealthCheck]:
    """Return checks for ``vtorque doctor``. Acting module; as the user who calls doctor.

    Raising shows as a failed check of this plugin.

    Example::

        from vtorque_core.api import always
        from vtorque_core.api.health import HealthCheck, HealthResult

        def check(site):
            yield HealthResult("ok", "2 Acme cards")

        vtorque_health_checks = always(HealthCheck("acme cards", check))
    """
    return ()


@hookspec
def vtorque_setup_steps(site: Site, place: Installation) -> Iterable[SetupStep]:
    r"""Return what ``vtorque setup install`` does to a node for this plugin, and takes back.

    Acting module; root. After the batch system's own steps, taken back before them; nobody's jobs
    are on the node then. ``vtorque doctor`` does not ask them: a health check may. Raising ends the
    install; at an uninstall it is told, and the others' steps are taken back.

    Example::

        from pathlib import Path
        from vtorque_core.api import hookimpl
        from vtorque_core.api.setup_steps import MARK, ReplacedFile

        @hookimpl
        def vtorque_setup_steps(site, place):
            rules = b"# Written by " + MARK + b"\nKERNEL==\"acme*\", MODE=\"0600\"\n"
            yield ReplacedFile(Path("/etc/udev/rules.d/90-acme.rules"), rules, mode=0o644)
    """
    return ()


# -- parse args (user at submission, root on the node) ----------------------------------------


@hookspec
def vtorque_options() -> Iterable[Option[Any]]:
    """Return the ``-vm`` keys this plugin brings. Declaring module; pure.

    Their limits are the site's: ``[options.<key>]``. Raising leaves the plugin out: its keys are
    then unknown.

    Example::

        from vtorque_core.api import Option, always, count

        FPGA = Option("fpga", parse=count, default=0, help="Acme FPGA cards per guest")

        vtorque_options = always(FPGA)
    """
    return ()


@hookspec
def vtorque_parse_args(request: JobRequest, site: Site) -> Iterable[Refusal]:
    """Judge the parsed request as a whole: return refusals of combinations of keys. Pure.

    It parses nothing: ``request`` has typed values of all keys, each within the site's policy.
    ``site`` has the settings of declaring modules. Declaring module; as the user at submission,
    again as root on the node. Raising refuses
    the job and names the plugin.

    Example::

        from vtorque_core.api import Option, Refusal, count, hookimpl

        LOW = Option("acme_min", count, 0, "fewest cards")
        HIGH = Option("acme_max", count, 4, "most cards")

        @hookimpl
        def vtorque_parse_args(request):
            if request[LOW] > request[HIGH]:
                yield Refusal("is more than acme_max", key="acme_min", value=str(request[LOW]))
    """
    return ()


@hookspec
def vtorque_needs(request: JobRequest, site: Site) -> Iterable[Extra]:
    """Return what the guests of a node need together beside vCPUs and RAM, for ``vsub`` to ask for.

    On any node: which one it will be is not known yet. Guests whose size is the job's leave it
    free. What the job really takes, ``vtorque_plan`` claims. Arguments as of
    ``vtorque_parse_args``; called with several numbers of vCPUs. Declaring module; as the user at
    submission, again as root on the node. Pure. Raising refuses the job and names the plugin.

    Example::

        from vtorque_core.api import Extra, hookimpl
        from vtorque_core.api.vm_options import VMS_PER_NODE

        @hookimpl
        def vtorque_needs(request):
            yield Extra(cpus=request[VMS_PER_NODE], mib=64)
    """
    return ()


# -- plan (root) ------------------------------------------------------------------------------


@hookspec
def vtorque_saved(
    job: BatchJob, request: JobRequest, image: Image, user: JobUser, site: Site
) -> Iterable[SavedGuest]:
    """Return the guests that the job's on this node go on with, in order; none: they are booted.

    Acting module; root on the node. Changes nothing. The plugin also brings each guest's disk
    (``vtorque_pre_boot``), where :func:`vtorque_core.api.guest_plan.root_disk` says. Raising
    refuses the job.

    Example::

        from pathlib import Path
        from vtorque_core.api import hookimpl
        from vtorque_core.api.guest_plan import SavedGuest

        @hookimpl
        def vtorque_saved(user):
            was = Path("/var/lib/vtorque/jobs/41.srv.0/g0"), Path("/run/vtorque/jobs/41.srv.0/g0")
            name, uuid = "vt-41.srv.0-n1-0", "0b1ad9ba-95f3-54cf-8d96-1d6ed3e4ac1f"
            leased = (("address", "10.86.0.16"),)
            file = Path(f"/srv/acme/{user}/41.memory")
            yield SavedGuest(name, uuid, "vn1", "41.srv", 0, leased, *was, file)
    """
    return ()


@hookspec
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterable[Claim | Refusal | Notice]:
    """Return what this guest needs of the node, or why it cannot be had. Changes nothing; root.

    It may look at the node (sysfs, a tool with a short time limit), but only if ``guest.host`` has
    nodes: ``vsub --dry-run`` calls it too, on a front end and as the user. A Notice is told to the
    user, and the job runs. The ledger answers all claims of a job in one locked transaction; the
    answer is ``guest.placement`` in all later hooks. Raising refuses the job.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.claims import PoolClaim

        @hookimpl
        def vtorque_plan(guest, site):
            yield PoolClaim("acme-fpga", items=("0000:3b:00.0", "0000:5e:00.0"), count=1)
    """
    return ()


@hookspec
def vtorque_away(guests: Sequence[GuestPlan], site: Site) -> Iterable[PoolClaim]:
    """Return items that this node may give to none of these guests, though they are free here.

    Those of a guest that has left for another node, and has them there; a plugin that is off for
    this job is asked, too. Acting module; root on the node, before the ledger's lock is taken,
    again each time that a start looks for room. What a guest has here that may leave in between is
    to be said, too. Raising refuses the job.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.claims import PoolClaim

        @hookimpl
        def vtorque_away(guests, site):
            yield PoolClaim("address", items=("10.86.0.16",))
    """
    return ()


# -- render domain (root; vsub --dry-run too) -------------------------------------------------


@hookspec
def vtorque_guest_context(guest: GuestPlan, site: Site) -> Iterable[ContextItem]:
    """Return what must hold inside the guest. Pure; root.

    An item that the guest type does not support refuses the job before anything is acquired; an
    item that fails inside fails the start with its name. Raising refuses the job.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.guest_context import EnvVar

        @hookimpl
        def vtorque_guest_context(guest, site):
            yield EnvVar("ACME_RANK", str(guest.rank))
    """
    return ()


@hookspec
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterable[Element]:
    """Return virtual hardware for this guest. Pure; root.

    Raising, or a conflict with another plugin, refuses the job and names both.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.libvirt_domain import MetadataEntry

        @hookimpl
        def vtorque_render_domain(guest, site):
            yield MetadataEntry("acme-cards", "1")
    """
    return ()


# -- pre-boot, post-boot (root) ---------------------------------------------------------------


@hookspec
def vtorque_pre_boot(job: NodeJob) -> None:
    """Acquire what the guests need before they start: ``job.acquire(resource, guest=guest)``.

    Once per job and node, as root. Raising HostFault (or anything else) sends the job elsewhere;
    raising Refused ends it with the reason.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_pre_boot(job):
            for guest in job.guests:
                for card in guest.leased("acme-fpga"):
                    print(f"would load {card} for {guest.name}")
    """


@hookspec
def vtorque_post_boot(job: NodeJob) -> None:
    """Act when all guests of the job on this node are ready, before the script runs.

    Once per job and node, as root. Raising: as ``vtorque_pre_boot``.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_post_boot(job):
            print(f"{len(job.guests)} guests of {job.id} are ready")
    """


# -- teardown (root) --------------------------------------------------------------------------


@hookspec
def vtorque_teardown(job: EndedJob) -> None:
    """Take a last look (final counters) before anything is released. Releases nothing.

    Once per job and node, as root, also after a failed start. Raising is logged.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_teardown(job):
            print(f"{job.id} of {job.owner} had {len(job.guests)} guests")
    """


@hookspec
def vtorque_ended(place: Place, site: Site) -> None:
    """Act when all of a job attempt is released on this node, and ``place`` has the last of it.

    As root in the epilogue, or in whatever releases it (the reaper, another job's start); after a
    failed start, too, and again if something was left to release. No lock is held, but the batch
    system waits. Raising is logged, and so is more than 30 s.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_ended(place, site):
            print(f"all is released of {place}")
    """


# -- in the job shell ---------------------------------------------------------------------------


@hookspec
def vtorque_beside_script(
    job: JobAttempt, batch: BatchSystem, site: Site
) -> Iterable[Sequence[str]]:
    """Return commands that run beside the job, on its first node, as its owner.

    Declaring module; called in the job shell as soon as root has begun to start the guests, also of
    interactive jobs. Each command is started once, without input or output, in a session of its
    own; of the job's environment it has what the batch system has set (``PBS_*``, ``SLURM_*``).
    When the script has ended, or the start has failed, it gets SIGTERM, and SIGKILL 0.2 s later;
    when the job shell was killed, nobody ends it. Whatever becomes of it changes nothing for the
    job. ``batch`` is the site's batch system. Raising: not reported.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_beside_script(job, site):
            yield ["/usr/bin/acme-meter", "--job", job.id]
    """
    return ()


# -- what is told of a job ----------------------------------------------------------------------


@hookspec
def vtorque_on_nodes(jobs: Sequence[JobInfo], site: Site, config: Path) -> Iterable[JobOnNode]:
    """Return what the nodes of running jobs say of them: ``vmgr ps --phase``.

    Declaring module; as the user who asks. ``config`` is the site config's file. What is returned
    may be a stranger's text. Raising is told the user, who gets the rest.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.batch_system import JobOnNode

        @hookimpl
        def vtorque_on_nodes(jobs):
            yield JobOnNode("42.srv", "n7", phase="run", guests=("acme-0",))
    """
    return ()


@hookspec
def vtorque_kept(site: Site) -> Iterable[Place]:
    """Return what is kept of jobs of the caller's in other places than this node.

    Declaring module; as the user who asks (``vmgr report``, ``logs``, ``ps --all``), never as
    root. What a Place has is read when somebody asks for it. Raising is told the user, who gets
    the rest.

    Example::

        import os
        from pathlib import Path
        from vtorque_core.api import Paths, hookimpl
        from vtorque_core.api.kept_records import Place

        @hookimpl
        def vtorque_kept(site):
            copies = Paths(state=Path("/copies/n7"))
            yield Place(copies, os.getuid(), "42.srv.0")
    """
    return ()


@hookspec
def vtorque_after_script(place: Place, code: int, site: Site) -> Iterable[Sequence[str]]:
    """Return commands whose output goes to the end of the job's error output.

    Declaring module; called in the job shell, as the job's owner, on the job's first node, when its
    script has ended with ``code``; not for interactive jobs. The guests are still there. ``place``
    is what is kept of the job on this node, ``site`` has the settings of declaring
    modules. A command has no input, a fixed environment, and what it writes to its own error output
    is lost. All commands of all plugins have one second together and then are killed. Raising, a
    missing program and exit codes change nothing for the job, and nobody is told.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_after_script(place, code):
            yield ["/usr/bin/echo", f"Acme thanks you for this job, which ended with {code}."]
    """
    return ()
