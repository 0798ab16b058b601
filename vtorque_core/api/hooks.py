"""The plugin API: every hook, in life-cycle order.

Contributions return typed data and have no side effects; actions run once per job and node, as
root, in one thread, in the sorted order of plugin names. There is no firstresult, no ordering
request and no wrapper. A raising plugin is named and never stops another's hook; what it costs
the job is said with each hook. Every example below is run by a test.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vtorque_core.api import hookspec
from vtorque_core.hookspecs_watch import (  # noqa: F401 - hooks, too
    vtorque_after_script,
    vtorque_log_handlers,
)

if TYPE_CHECKING:
    from vtorque_core import api, api_node
    from vtorque_core.api_context import ContextItem
    from vtorque_core.api_domain import Element
    from vtorque_core.api_telemetry import Exporter

# -- set up -----------------------------------------------------------------------------------


@hookspec
def vtorque_settings() -> Iterable[type[Any]]:
    """Return the frozen dataclass that is this plugin's ``[plugin.<name>]`` table.

    In either module; called whenever the site config is read. Raising leaves the plugin out and
    reports it.

    Example::

        from dataclasses import dataclass
        from vtorque_core.api import hookimpl, setting

        @dataclass(frozen=True)
        class Settings:
            cards: tuple[str, ...] = setting((), doc="PCI addresses of this node's cards")

        @hookimpl
        def vtorque_settings():
            yield Settings
    """
    return ()


@hookspec
def vtorque_guest_types() -> Iterable[api.GuestType]:
    """Return the guest types this plugin brings. Declaring module; any user.

    Two plugins with the same name are refused, naming both. Raising leaves the plugin out.

    Example::

        from vtorque_core.api import GuestType, hookimpl

        def driver():
            from acme.node import AcmeDriver
            return AcmeDriver()

        @hookimpl
        def vtorque_guest_types():
            yield GuestType("acme", supports=frozenset({"EnvVar"}), driver=driver)
    """
    return ()


@hookspec
def vtorque_batch_systems() -> Iterable[api.BatchSystem]:
    """Return the batch systems this plugin brings. Declaring module; any user.

    The site chooses one with ``[batch] system``. Raising leaves the plugin out.

    Example::

        from vtorque_core.api import BatchSystem, hookimpl

        def submitter(site):
            from acme.submit import AcmeSubmitter
            return AcmeSubmitter(site)

        @hookimpl
        def vtorque_batch_systems():
            yield BatchSystem("acme", submitter=submitter, node=..., shell=...)
    """
    return ()


@hookspec
def vtorque_image_builders() -> Iterable[api.ImageBuilder]:
    """Return the image builders this plugin brings. Declaring module; used by ``vmgr images``.

    Raising leaves the plugin out.

    Example::

        from vtorque_core.api import ImageBuilder, hookimpl

        def builder():
            from acme.build import AcmeBuilder
            return AcmeBuilder()

        @hookimpl
        def vtorque_image_builders():
            yield ImageBuilder("acme", "an Acme appliance", builder=builder)
    """
    return ()


@hookspec
def vtorque_commands() -> Iterable[api.Command]:
    """Return click commands for ``vmgr`` or ``vtorque``. Declaring module; never used by vsub.

    Raising leaves the plugin out.

    Example::

        from vtorque_core.api import Command, hookimpl

        def cards():
            import click
            return click.Command("cards", help="List the Acme cards.")

        @hookimpl
        def vtorque_commands():
            yield Command("vmgr", load=cards)
    """
    return ()


@hookspec
def vtorque_resources() -> Iterable[type[api_node.Resource]]:
    """Return the resource kinds this plugin acquires, so that teardown can release them.

    Acting module; root on the node. Raising refuses the jobs that need this plugin.

    Example::

        from dataclasses import dataclass
        from vtorque_core.api import hookimpl
        from vtorque_core.api_node import Resource, run_tool

        @dataclass(frozen=True)
        class Shell(Resource):
            kind = "acme-shell"
            card: str

            def create(self):
                run_tool("acme-load", self.card)
            def release(self):
                run_tool("acme-load", self.card, "--blank")

        @hookimpl
        def vtorque_resources():
            yield Shell
    """
    return ()


@hookspec
def vtorque_health_checks() -> Iterable[api_node.HealthCheck]:
    """Return checks for ``vtorque doctor``. Acting module; as the user who calls doctor.

    Raising shows as a failed check of this plugin.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api_node import HealthCheck, HealthResult

        def check(site):
            yield HealthResult("ok", "2 Acme cards")

        @hookimpl
        def vtorque_health_checks():
            yield HealthCheck("acme cards", check)
    """
    return ()


@hookspec
def vtorque_exporters() -> Iterable[Exporter]:
    """Return where telemetry's samples can go. Acting module; root, in the node's sampler.

    Raising is logged; other plugins' exporters work.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api_telemetry import Exporter

        def acme(site):
            from acme.push import AcmeSink
            return AcmeSink()

        @hookimpl
        def vtorque_exporters():
            yield Exporter("acme", open=acme)
    """
    return ()


# -- parse args (user at submission, root on the node) ----------------------------------------


@hookspec
def vtorque_options() -> Iterable[api.Option[Any]]:
    """Return the ``-vm`` keys this plugin brings. Declaring module; pure.

    Their limits are the site's: ``[options.<key>]``. Raising leaves the plugin out: its keys are
    then unknown.

    Example::

        from vtorque_core.api import Option, count, hookimpl

        FPGA = Option("fpga", parse=count, default=0, help="Acme FPGA cards per guest")

        @hookimpl
        def vtorque_options():
            yield FPGA
    """
    return ()


@hookspec
def vtorque_parse_args(request: api.JobRequest, site: api_node.Site) -> Iterable[api.Refusal]:
    """Return refusals of combinations of keys; single keys are the site policy's. Pure.

    ``request`` has typed values of all keys, within policy; ``site`` the settings of declaring
    modules. Declaring module; as the user at submission, again as root on the node. Raising refuses
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
def vtorque_needs(request: api.JobRequest, site: api_node.Site) -> Iterable[api.Extra]:
    """Return what the guests of a node need together beside vCPUs and RAM, for ``vsub`` to ask for.

    On any node: which one it will be is not known yet. What the job really takes, ``vtorque_plan``
    claims. Arguments as of ``vtorque_parse_args``. Declaring module; as the user at submission.
    Pure. Raising refuses the job and names the plugin.

    Example::

        from vtorque_core.api import Extra, hookimpl
        from vtorque_core.api_options import VMS_PER_NODE

        @hookimpl
        def vtorque_needs(request):
            yield Extra(cpus=request[VMS_PER_NODE], mib=64)
    """
    return ()


# -- plan (root) ------------------------------------------------------------------------------


@hookspec
def vtorque_plan(
    guest: api_node.GuestPlan, site: api_node.Site
) -> Iterable[api_node.Claim | api.Refusal | api_node.Notice]:
    """Return what this guest needs of the node, or why it cannot be had. Changes nothing; root.

    It may look at the node (sysfs, a tool with a short time limit), but only if ``guest.host`` has
    nodes: ``vsub --dry-run`` calls it too, on a front end and as the user. A Notice is told to the
    user, and the job runs. The ledger answers all claims of a job in one locked transaction; the
    answer is ``guest.placement`` in all later hooks. Raising refuses the job.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api_node import PoolClaim

        @hookimpl
        def vtorque_plan(guest, site):
            yield PoolClaim("acme-fpga", items=("0000:3b:00.0", "0000:5e:00.0"), count=1)
    """
    return ()


# -- render domain (root; vsub --dry-run too) -------------------------------------------------


@hookspec
def vtorque_guest_context(guest: api_node.GuestPlan, site: api_node.Site) -> Iterable[ContextItem]:
    """Return what must hold inside the guest. Pure; root.

    An item that the guest type does not support refuses the job before anything is acquired; an
    item that fails inside fails the start with its name. Raising refuses the job.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api_context import EnvVar

        @hookimpl
        def vtorque_guest_context(guest, site):
            yield EnvVar("ACME_RANK", str(guest.rank))
    """
    return ()


@hookspec
def vtorque_render_domain(guest: api_node.GuestPlan, site: api_node.Site) -> Iterable[Element]:
    """Return virtual hardware for this guest. Pure; root.

    Raising, or a conflict with another plugin, refuses the job and names both.

    Example::

        from vtorque_core.api import hookimpl
        from vtorque_core.api_domain import MetadataEntry

        @hookimpl
        def vtorque_render_domain(guest, site):
            yield MetadataEntry("acme-cards", "1")
    """
    return ()


# -- pre-boot, post-boot (root) ---------------------------------------------------------------


@hookspec
def vtorque_pre_boot(job: api_node.NodeJob) -> None:
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
def vtorque_post_boot(job: api_node.NodeJob) -> None:
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
def vtorque_teardown(job: api_node.EndedJob) -> None:
    """Take a last look (final counters) before anything is released. Releases nothing.

    Once per job and node, as root, also after a failed start. Raising is logged.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_teardown(job):
            print(f"{job.id} of {job.owner} had {len(job.guests)} guests")
    """
