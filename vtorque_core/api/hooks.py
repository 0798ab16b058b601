"""The plugin API: every hook, in the order of a job's life.

A hook implementation is a function under ``hookimpl``, or ``always(...)`` if it takes no arguments
and always returns the same. It may omit arguments. A hook that returns data has no side effects.
Other hooks act once per job and node, as root, in one thread, in the sorted order of plugin names.
An error in one plugin is reported with the plugin's name and does not stop other plugins' hooks.

``Module`` is the module that has the hook: declaring (``vtorque1``) or acting (``vtorque1.node``).
"Does not start" means: ``Refused`` ends the job with the reason and exit status 121; other
exceptions are faults of the node (122), and the job may run on another node.
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
    from vtorque_core.api.boot_source import BootSource, Offer, RenderedGuest
    from vtorque_core.api.claims import Claim, Notice, PoolClaim
    from vtorque_core.api.guest_context import ContextItem
    from vtorque_core.api.guest_plan import GuestPlan, JobUser
    from vtorque_core.api.health import HealthCheck
    from vtorque_core.api.kept_records import Place
    from vtorque_core.api.libvirt_domain import Element
    from vtorque_core.api.node_job import EndedJob, NodeJob, ReceivingNode, Site
    from vtorque_core.api.setup_steps import Installation, SetupStep
    from vtorque_core.api.strategies import BatchSystem, Command, GuestType, ImageBuilder, OfJob
    from vtorque_core.api.values import Extra, Image, JobRequest, Option
    from vtorque_core.base.errors import Refusal
    from vtorque_core.base.names import JobAttempt

# -- set up -----------------------------------------------------------------------------------


@hookspec
def vtorque_settings() -> Iterable[type[Any]]:
    """Return the frozen dataclass of this plugin's table ``[plugin.<name>]``.

    Module: either.
    Called: whenever the site config is read, by any user.
    Errors: the plugin is reported as broken.

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
    """Return the guest types of this plugin. Their names must differ from other plugins'.

    Module: declaring.
    Called: by every command, as any user.
    Errors: the plugin is disabled.

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
    """Return the batch systems of this plugin. The site selects one with ``[batch] system``.

    Module: declaring.
    Called: by every command, as any user.
    Errors: the plugin is disabled.

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
    """Return the image builders of this plugin.

    Module: declaring.
    Called: by ``vmgr images build``, as root.
    Errors: the plugin is disabled.

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
    """Return click commands of ``vmgr``, ``vtorque`` or one of their groups.

    The core's command of the same name takes precedence. With ``@click.pass_obj`` a command of
    ``vmgr`` gets the path of the site config.

    Module: declaring.
    Called: by ``vmgr`` and ``vtorque``, as any user; never by ``vsub``.
    Errors: the plugin is disabled.

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
    """Return the command that replaces a command about a job of another node.

    The returned command may run on the job's node. Called only for commands with
    ``Command.of_job``.

    Module: declaring.
    Called: by ``vmgr``, as the calling user.
    Errors: the command is left out.

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
    """Return the resource classes that this plugin acquires and teardown must release.

    A record whose class no plugin returns becomes an orphan.

    Module: acting.
    Called: at start and teardown, on the node, as root.
    Errors: jobs that need this plugin are refused, and its records stay.

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
    """Return the checks that ``vtorque doctor`` runs.

    Module: acting.
    Called: by ``vtorque doctor``, as its caller.
    Errors: doctor shows a failed check of this plugin.

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
    r"""Return steps that ``vtorque setup install`` applies for this plugin, and uninstall reverts.

    They run after the batch system's steps, and are reverted before them, while the node has no
    jobs. ``vtorque doctor`` does not check them; add a health check for that.

    Module: acting.
    Called: by ``vtorque setup``, as root.
    Errors: the installation stops; an uninstallation reports the error and continues.

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
    """Return this plugin's options: its ``-vm`` keys. ``[options.<key>]`` sets their limits.

    Module: declaring.
    Called: at submission as the user and on the node as root.
    Errors: the plugin is disabled, so its keys are unknown.

    Example::

        from vtorque_core.api import Option, always, count

        FPGA = Option("fpga", parse=count, default=0, help="Acme FPGA cards per guest")

        vtorque_options = always(FPGA)
    """
    return ()


@hookspec
def vtorque_parse_args(request: JobRequest, site: Site) -> Iterable[Refusal]:
    """Check combinations of options in the whole parsed request, and return refusals.

    Each value is already within the site's limits. ``site`` has the settings of declaring modules.

    Module: declaring.
    Called: at submission as the user and on the node as root.
    Errors: the job is refused.

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
    """Return resources that the guests of one node need together besides vCPUs and RAM.

    ``vsub`` requests them from the batch system. Guests with the job's size leave them free.
    ``vtorque_plan`` claims the resources themselves. The hook may be called with several numbers of
    vCPUs.

    Module: declaring.
    Called: at submission as the user and on the node as root.
    Errors: the job is refused.

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
def vtorque_boot_sources(
    job: BatchJob, request: JobRequest, image: Image, user: JobUser, site: Site
) -> Iterable[BootSource]:
    """Return the boot sources of the job's guests on this node, in the guests' order.

    Use this hook for sources that decide the names, addresses or number of the guests, because the
    core calls it before the claims. It is not called for guests that migrate to this node. If two
    plugins return sources, the job does not start.

    Module: acting.
    Called: on the node, as root.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.boot_source import BootSource

        class Checkpoint(BootSource):
            name = "acme-checkpoint"

            def start(self, boot):
                print(f"{boot.guest.name} starts from a checkpoint")
                boot.create()

        @hookimpl
        def vtorque_boot_sources(job):
            return [Checkpoint()] if job.name else []
    """
    return ()


@hookspec
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterable[Claim | Refusal | Notice]:
    """Return the claims of one guest on this node, or a refusal.

    The hook may read sysfs or call a tool with a short time limit if ``guest.host`` has nodes, that
    is, not on a submit host. A Notice is shown to the user, and the job runs. The ledger answers
    all claims of a job in one transaction; later hooks find the answer in ``guest.placement``.

    Module: acting.
    Called: on the node, as root, and by ``vsub --dry-run``, as the user.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.claims import PoolClaim

        @hookimpl
        def vtorque_plan(guest, site):
            yield PoolClaim("acme-fpga", items=("0000:3b:00.0", "0000:5e:00.0"), count=1)
    """
    return ()


@hookspec
def vtorque_reserved(guests: Sequence[GuestPlan], site: Site) -> Iterable[PoolClaim]:
    """Return items that this node must not assign to these guests although they are free.

    An example is the address of a guest that has migrated to another node and still uses it.
    Include items of guests that may leave before the ledger's decision. The hook is called even if
    the plugin is disabled for the job.

    Module: acting.
    Called: on the node, as root, before the ledger's lock is acquired, and again whenever a waiting
    start retries.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.claims import PoolClaim

        @hookimpl
        def vtorque_reserved(guests, site):
            yield PoolClaim("address", items=("10.86.0.16",))
    """
    return ()


# -- render domain (root; vsub --dry-run too) -------------------------------------------------


@hookspec
def vtorque_guest_context(guest: GuestPlan, site: Site) -> Iterable[ContextItem]:
    """Return context items: settings, files and commands inside the guest.

    If the guest type does not support an item, the job is refused before anything is acquired. If
    an item fails inside the guest, the start fails with a message that names it.

    Module: acting.
    Called: on the node, as root, and by ``vsub --dry-run``, as the user.
    Errors: the job does not start.

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
    """Return virtual hardware for this guest.

    A conflict with another plugin refuses the job; the message names both.

    Module: acting.
    Called: on the node, as root, and by ``vsub --dry-run``, as the user.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.libvirt_domain import MetadataEntry

        @hookimpl
        def vtorque_render_domain(guest, site):
            yield MetadataEntry("acme-cards", "1")
    """
    return ()


@hookspec
def vtorque_rendered_sources(guests: Sequence[RenderedGuest], site: Site) -> Iterable[Offer]:
    """Return boot sources for guests that would boot cold, based on their rendered domains.

    ``guests`` are those without a source from ``vtorque_boot_sources``. Of several offers for a
    guest, the core uses the first whose warm guest (``BootSource.adopts``) it can claim. If two
    plugins make offers, the job does not start.

    Module: acting.
    Called: once, on the node, as root.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.boot_source import BootSource, Offer

        class Loud(BootSource):
            name = "acme"

            def start(self, boot):
                print(f"{boot.guest.name} boots")
                boot.create()

        @hookimpl
        def vtorque_rendered_sources():
            return [Offer(0, Loud())]  # for the first guest
    """
    return ()


# -- pre-boot, post-boot (root) ---------------------------------------------------------------


@hookspec
def vtorque_pre_boot(job: NodeJob) -> None:
    """Acquire resources that guests need for their boot: ``job.acquire(resource, guest=guest)``.

    The core's directories, disks, shares and packet filters and the guest type's resources already
    exist.

    Module: acting.
    Called: once per job and node, as root.
    Errors: everything is released, and the job does not start.

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

    ``job.acquire`` fails after ``job.deadline``, which limits the whole start. ``job.warn``
    notifies user and admin of missing capabilities.

    Module: acting.
    Called: once per job and node, as root.
    Errors: everything is released, and the job does not start.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_post_boot(job):
            print(f"{len(job.guests)} guests of {job.id} are ready")
    """


@hookspec
def vtorque_receive(node: ReceivingNode) -> None:
    """Receive guests that run on another node: ``node.start(...)`` with a source for each.

    Module: acting.
    Called: by ``vtorque hook receive``, as root, on the destination node.
    Errors: the exit status is 1; the plugin must inform the source node.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_receive(node):
            print(f"acme receives guests on {node}")
    """


# -- teardown (root) --------------------------------------------------------------------------


@hookspec
def vtorque_teardown(job: EndedJob) -> None:
    """Read final counters before anything is released. Release nothing.

    The hook sees only what the journal contains.

    Module: acting.
    Called: once per job and node, as root, also after a failed start, in a child process with a
    time limit.
    Errors: the error is logged.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_teardown(job):
            print(f"{job.id} of {job.owner} had {len(job.guests)} guests")
    """


@hookspec
def vtorque_ended(place: Place, site: Site) -> None:
    """Act after everything of a job attempt is released on this node.

    ``place`` has the final records. The hook is also called after failed and refused starts, and
    again if a later teardown released something. No lock is held, but the batch system waits.

    Module: acting.
    Called: by the epilogue, the reaper or another job's start, as root, for at most 30 s.
    Errors: the error is logged.

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
    """Return commands that run beside the script on the job's first node.

    Each command starts once, when root starts the guests, in its own session, without input or
    output. Of the job's environment it gets only the batch system's variables (``PBS_*``,
    ``SLURM_*``). After the script or a failed start it gets SIGTERM, and SIGKILL 0.2 s later. If
    the job shell is killed, the command continues.

    Module: declaring.
    Called: in the job shell, as the job's owner, also for interactive jobs.
    Errors: the error is ignored.

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
    """Return phase and guests of running jobs on their nodes, for ``vmgr ps --phase``.

    ``config`` is the path of the site config. The returned text is untrusted.

    Module: declaring.
    Called: by ``vmgr ps --phase``, as its caller.
    Errors: the caller sees the error and the other plugins' answers.

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
    """Return places outside this node that have records of the caller's ended jobs.

    Module: declaring.
    Called: by ``vmgr report``, ``logs`` and ``ps --all``, as the caller, never as root.
    Errors: the caller sees the error and the other plugins' answers.

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
    """Return commands whose output is appended to the job's error output.

    The guests still exist. ``code`` is the script's exit status, and ``place`` has the job's
    records on this node. A command has no input and a fixed environment; its standard error is
    discarded. All commands of all plugins share one second and are then killed.

    Module: declaring.
    Called: in the job shell on the first node, as the job's owner, after the script; not for
    interactive jobs.
    Errors: the error is ignored.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_after_script(place, code):
            yield ["/usr/bin/echo", f"Acme thanks you for this job, which ended with {code}."]
    """
    return ()
