"""The plugin API: every hook, in the order of a job's life.

A hook implementation is a function with the decorator ``hookimpl``, or ``constant_hook(...)`` if
its result is constant. The implementation may omit arguments. A hook that returns data must have no
side effects. Other hooks run as root, in one thread, in the sorted order of plugin names. An error
is reported with the plugin's name, and does not stop other plugins' hooks.

A plugin has at most one module in each entry-point group, ``vtorque1`` and ``vtorque1.node``.
Only programs on nodes and ``vsub --dry-run`` import ``vtorque1.node`` modules. In a ``vtorque1``
module, which every ``vsub`` imports, ``site`` has only the settings of ``vtorque1`` modules.

"The job does not start" means: ``Refused`` ends the job with exit status 121. Other exceptions are
faults of the node (122), and the job may run on another node.
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
    from vtorque_core.api.strategies import (
        BatchSystem,
        Command,
        GuestType,
        ImageBuilder,
        ImageSource,
        Remote,
    )
    from vtorque_core.api.values import Extra, Image, JobRequest, Option
    from vtorque_core.base.errors import Refusal
    from vtorque_core.base.names import JobAttempt

# -- set up -----------------------------------------------------------------------------------


@hookspec
def vtorque_settings() -> Iterable[type[Any]]:
    """Return the frozen dataclass of this plugin's table ``[plugin.<name>]``.

    Modules of ``vtorque1`` and ``vtorque1.node`` may implement this hook.

    Entry-point group: either.
    Called: whenever the site config is read, by any user.
    Errors: the plugin is reported as broken.

    Example::

        from dataclasses import dataclass
        from vtorque_core.api import constant_hook, setting

        @dataclass(frozen=True)
        class Settings:
            cards: tuple[str, ...] = setting((), doc="PCI addresses of this node's cards")

        vtorque_settings = constant_hook(Settings)
    """
    return ()


@hookspec
def vtorque_guest_types() -> Iterable[GuestType]:
    """Return this plugin's guest types, with unique names.

    Entry-point group: ``vtorque1``.
    Called: by every command, as any user.
    Errors: the plugin is disabled.

    Example::

        from vtorque_core.api import GuestType, constant_hook

        ACME = GuestType("acme", supports=frozenset({"EnvVar"}), driver=...)
        vtorque_guest_types = constant_hook(ACME)
    """
    return ()


@hookspec
def vtorque_batch_systems() -> Iterable[BatchSystem]:
    """Return this plugin's batch systems. The site selects one with ``[batch] system``.

    Entry-point group: ``vtorque1``.
    Called: by every command, as any user.
    Errors: the plugin is disabled.

    Example::

        from vtorque_core.api import BatchSystem, constant_hook

        ACME = BatchSystem("acme", submitter=..., node=..., shell=...)
        vtorque_batch_systems = constant_hook(ACME)
    """
    return ()


@hookspec
def vtorque_image_builders() -> Iterable[ImageBuilder]:
    """Return this plugin's image builders.

    Entry-point group: ``vtorque1``.
    Called: by ``vmgr images build``, as root.
    Errors: the plugin is disabled.

    Example::

        from vtorque_core.api import ImageBuilder, constant_hook

        ACME = ImageBuilder("acme", builder=...)
        vtorque_image_builders = constant_hook(ACME)
    """
    return ()


@hookspec
def vtorque_image_sources() -> Iterable[ImageSource]:
    """Return this plugin's source of users' own images. A site has at most one source.

    Entry-point group: ``vtorque1``.
    Called: for ``-vm img=`` with a slash or colon, by ``vsub`` as the user, on the node as root.
    Errors: the plugin is disabled.

    Example::

        from vtorque_core.api import ImageSource, constant_hook

        ACME = ImageSource(
            base=..., resolve=..., image=..., shares=..., mine=..., remove=...
        )
        vtorque_image_sources = constant_hook(ACME)
    """
    return ()


@hookspec
def vtorque_commands() -> Iterable[Command]:
    """Return click commands of ``vmgr``, ``vtorque`` or one of their groups.

    The core's commands take precedence. With ``@click.pass_obj`` a command of ``vmgr`` gets the
    path of the site config.

    Entry-point group: ``vtorque1``.
    Called: by ``vmgr`` and ``vtorque``, as any user; never by ``vsub``.
    Errors: the plugin is disabled.

    Example::

        from vtorque_core.api import Command, constant_hook

        def cards():
            import click
            return click.Command("cards", help="List the Acme cards.")

        vtorque_commands = constant_hook(Command("vmgr cards", load=cards))
    """
    return ()


@hookspec
def vtorque_remote_command(
    command: click.Command, of_job: Remote, config: Path
) -> Iterable[click.Command]:
    """Return a replacement for ``command`` of ``vmgr``, which runs ``command`` on the job's node.

    Entry-point group: ``vtorque1``.
    Called: by ``vmgr``, as a user who runs or lists a command registered as ``Command(of_job=..)``.
    Errors: the command is disabled.

    Example::

        import click
        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_remote_command(command, of_job, config):
            def rsh(words):
                click.echo(f"acme-rsh vmgr {command.name} {' '.join(words)}")
            words = click.Argument(["words"], nargs=-1)
            yield click.Command(command.name, callback=rsh, params=[words])
    """
    return ()


@hookspec
def vtorque_resources() -> Iterable[type[Resource]]:
    """Return the classes of resources that this plugin acquires and the epilogue must release.

    Entry-point group: ``vtorque1.node``.
    Called: when a job's resources are acquired or released, on the node, as root.
    Errors: jobs that need this plugin are refused, and its resources are not released.

    Example::

        from dataclasses import dataclass
        from vtorque_core.api import constant_hook, run_tool
        from vtorque_core.api.acquired import Resource

        @dataclass(frozen=True)
        class Shell(Resource):
            kind = "acme-shell"
            card: str

            def create(self):
                run_tool("acme-load", self.card)
            def release(self):
                run_tool("acme-load", self.card, "--blank")

        vtorque_resources = constant_hook(Shell)
    """
    return ()


@hookspec
def vtorque_health_checks() -> Iterable[HealthCheck]:
    """Return the checks that ``vtorque doctor`` runs.

    Entry-point group: ``vtorque1.node``.
    Called: by ``vtorque doctor``, as its caller.
    Errors: shown as a failed check.

    Example::

        from vtorque_core.api import constant_hook
        from vtorque_core.api.health import HealthCheck, HealthResult

        def check(site):
            yield HealthResult("ok", "2 Acme cards")

        vtorque_health_checks = constant_hook(HealthCheck("acme cards", check))
    """
    return ()


@hookspec
def vtorque_setup_steps(site: Site, place: Installation) -> Iterable[SetupStep]:
    r"""Return this plugin's steps for ``vtorque setup install`` and ``uninstall``.

    ``install`` applies these steps after the batch system's steps. ``uninstall`` requires a node
    without jobs, and reverts these steps first. ``vtorque doctor`` does not check these steps.

    Entry-point group: ``vtorque1.node``.
    Called: by ``vtorque setup``, as root.
    Errors: an installation stops; an uninstallation continues.

    Example::

        from pathlib import Path
        from vtorque_core.api import hookimpl
        from vtorque_admin.steps import MARK, ReplacedFile

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

    Entry-point group: ``vtorque1``.
    Called: at submission as the user and on the node as root.
    Errors: the plugin is disabled.

    Example::

        from vtorque_core.api import Option, constant_hook, count

        FPGA = Option("fpga", parse=count, default=0, help="Acme FPGA cards per guest")

        vtorque_options = constant_hook(FPGA)
    """
    return ()


@hookspec
def vtorque_parse_args(request: JobRequest, site: Site) -> Iterable[Refusal]:
    """Check combinations of the request's options, and return refusals.

    Each value is already within the site's limits.

    Entry-point group: ``vtorque1``.
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
    """Return resources that the guests of one node need besides vCPUs and RAM.

    ``vsub`` requests them from the batch system; claim them in ``vtorque_plan``. ``vsub`` may call
    the hook repeatedly, with different numbers of vCPUs.

    Entry-point group: ``vtorque1``.
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

    Implement this hook for sources, such as checkpoints, that determine names, addresses or number
    of the guests. It is not called for guests that migrate to this node.

    Entry-point group: ``vtorque1.node``.
    Called: before the claims, on the node, as root.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.boot_source import BootSource

        class Checkpoint(BootSource):
            name = "acme-checkpoint"

        @hookimpl
        def vtorque_boot_sources(job):
            return [Checkpoint()] if job.name else []
    """
    return ()


@hookspec
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterable[Claim | Refusal | Notice]:
    """Return the claims of one guest on this node, or a refusal.

    On a node (``guest.host`` has NUMA nodes), the hook may read sysfs or call a tool with a short
    time limit. A Notice is shown to the user.

    Entry-point group: ``vtorque1.node``.
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
def vtorque_reserved_items(guests: Sequence[GuestPlan], site: Site) -> Iterable[PoolClaim]:
    """Return free items of pools that this node must not assign to these guests.

    Example: the address of a guest that migrates, or has migrated, to another node. The hook is
    called even if ``[[limits]]`` disables the plugin for the job.

    Entry-point group: ``vtorque1.node``.
    Called: on the node, as root, before the claims, and again while the job waits for resources.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.claims import PoolClaim

        @hookimpl
        def vtorque_reserved_items(guests, site):
            yield PoolClaim("address", items=("10.86.0.16",))
    """
    return ()


# -- render domain (root; vsub --dry-run too) -------------------------------------------------


@hookspec
def vtorque_guest_context(guest: GuestPlan, site: Site) -> Iterable[ContextItem]:
    """Return context items: settings, files and commands inside the guest.

    Entry-point group: ``vtorque1.node``.
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

    Entry-point group: ``vtorque1.node``.
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

    Only one plugin may return offers, perhaps several for a guest: the core uses the first usable
    offer. An offer with a ``warm_key`` is usable if the core can claim that warm guest.

    Entry-point group: ``vtorque1.node``.
    Called: once, on the node, as root.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.boot_source import BootSource, Offer

        class Acme(BootSource):
            name = "acme"

        @hookimpl
        def vtorque_rendered_sources():
            return [Offer(0, Acme())]
    """
    return ()


# -- pre-boot to post-boot (root) -------------------------------------------------------------


@hookspec
def vtorque_pre_boot(job: NodeJob) -> None:
    """Acquire resources that guests need for their boot: ``job.acquire(resource, guest=guest)``.

    The resources of the core and of the guest type already exist.

    Entry-point group: ``vtorque1.node``.
    Called: once per job and node, as root.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_pre_boot(job):
            for guest in job.guests:
                for card in guest.leased_items("acme-fpga"):
                    print(f"would load {card} for {guest.name}")
    """


@hookspec
def vtorque_while_booting(job: NodeJob) -> None:
    """Act while the guests boot: their domains run, but the guests are not ready yet.

    If guests boot on the job shell's order (:class:`LateDriver`), their domains do not exist yet.

    Start processes of the node here (:class:`vtorque_core.live.node_process.NodeProcess`). Earlier,
    they would use CPUs that QEMU needs to start.

    Entry-point group: ``vtorque1.node``.
    Called: once per job and node, as root.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_while_booting(job):
            print(f"{len(job.guests)} guests of {job.id} boot")
    """


@hookspec
def vtorque_post_boot(job: NodeJob) -> None:
    """Act when all guests of the job on this node are ready, before the script runs.

    ``job.acquire`` fails after ``job.deadline``, which limits the whole start.

    Entry-point group: ``vtorque1.node``.
    Called: once per job and node, as root.
    Errors: the job does not start.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_post_boot(job):
            print(f"{len(job.guests)} guests of {job.id} are ready")
    """


@hookspec
def vtorque_receive(node: ReceivingNode) -> None:
    """Receive guests from another node: call ``node.start(...)`` with their boot sources.

    Entry-point group: ``vtorque1.node``.
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
    """Read final counters of a job before its resources are released.

    Only the journal is available, not the config.

    Entry-point group: ``vtorque1.node``.
    Called: once per job and node, as root, also after a failed start, in a child process with a
    time limit.
    Errors: logged.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_teardown(job):
            print(f"{job.id} of {job.owner} had {len(job.guests)} guests")
    """


@hookspec
def vtorque_job_ended(place: Place, site: Site) -> None:
    """Process the final records of a job attempt whose resources on this node are released.

    ``place`` has the records. Also called after failed and refused starts, and again if a later
    teardown released something.

    Entry-point group: ``vtorque1.node``.
    Called: by the epilogue, the reaper or another job's prologue, as root, for at most 30 s.
    Errors: logged.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_job_ended(place, site):
            print(f"all is released of {place}")
    """


# -- in the job shell ---------------------------------------------------------------------------


@hookspec
def vtorque_beside_script(
    job: JobAttempt, batch: BatchSystem, site: Site
) -> Iterable[Sequence[str]]:
    """Return commands that run beside the script on the job's first node.

    Each command starts when root starts the guests, in its own session, without input or output.
    Its environment has only the batch system's variables (``PBS_*``, ``SLURM_*``). After the script
    or a failed start, the job shell sends SIGTERM to the command, and SIGKILL 0.2 s later.

    Entry-point group: ``vtorque1``.
    Called: in the job shell, as the job's owner, also for interactive jobs.
    Errors: ignored.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_beside_script(job, site):
            yield ["/usr/bin/acme-meter", "--job", job.id]
    """
    return ()


# -- information about jobs ---------------------------------------------------------------------


@hookspec
def vtorque_jobs_on_nodes(jobs: Sequence[JobInfo], site: Site, config: Path) -> Iterable[JobOnNode]:
    """Return phase and guests of running jobs on their nodes.

    The returned text is untrusted.

    Entry-point group: ``vtorque1``.
    Called: by ``vmgr ps --phase``, as its caller.
    Errors: shown to the caller.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api.batch_system import JobOnNode

        @hookimpl
        def vtorque_jobs_on_nodes(jobs):
            yield JobOnNode("42.srv", "n7", phase="run", guests=("acme-0",))
    """
    return ()


@hookspec
def vtorque_kept_records(site: Site) -> Iterable[Place]:
    """Return directories with copies of the records of the caller's ended jobs.

    Entry-point group: ``vtorque1``.
    Called: by ``vmgr report``, ``logs`` and ``ps --all``, as the caller, never as root.
    Errors: shown to the caller.

    Example::

        import os
        from pathlib import Path
        from vtorque_core.api import Paths, hookimpl
        from vtorque_core.api.kept_records import Place

        @hookimpl
        def vtorque_kept_records(site):
            copies = Paths(state=Path("/copies/n7"))
            yield Place(copies, os.getuid(), "42.srv.0")
    """
    return ()


@hookspec
def vtorque_after_script(place: Place, code: int, site: Site) -> Iterable[Sequence[str]]:
    """Return commands whose output is appended to the job's error output.

    ``code`` is the script's exit status, and ``place`` has the job's records on this node. A
    command has no input and a fixed environment; its standard error is discarded. All commands are
    killed after one second.

    Entry-point group: ``vtorque1``.
    Called: in the job shell, as the job's owner, not for interactive jobs.
    Errors: ignored.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_after_script(place, code):
            yield ["/usr/bin/echo", f"Acme thanks you for this job, which ended with {code}."]
    """
    return ()
