"""Receive migrating guests on the destination node, with a plugin's protocol. As root."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import hooks
from vtorque_core.api.batch_system import MigrationAdapter, NodeAdapter
from vtorque_core.api.boot_source import BootSource
from vtorque_core.api.log_levels import parse
from vtorque_core.api.unprivileged_parser import helper_process
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import EXIT_FAILED, EXIT_OK, Refused, VtorqueError, printable
from vtorque_core.base.locks import job_lock
from vtorque_core.config.plugins import PluginError, Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.node.start.cleanup import release_attempts
from vtorque_core.node.start.start_order import start_job
from vtorque_core.plan import job_context
from vtorque_core.records import log
from vtorque_core.records.reading import find
from vtorque_core.resources import virtiofs_daemon

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReceivingJob:
    """This node as destination of a migration.

    Plugins get it as :class:`vtorque_core.api.node_job.ReceivingNode`.
    ``requests`` and ``answers`` are descriptors of the connection to the source node.
    """

    adapter: NodeAdapter
    site: Site
    plugins: Plugins
    requests: int
    answers: int

    @property
    def uri(self) -> str:
        return self.site.node.libvirt_uri

    @property
    def start_timeout(self) -> float:
        return self.site.node.start_timeout

    def require_versions(self, name: str, versions: Mapping[str, str]) -> None:
        if not virtiofs_daemon.can_save():
            raise Refused(f"the virtiofsd of {name} cannot save its state, as migration requires")
        here = hypervisor.versions(self.uri)
        for program, version in versions.items():
            if here.get(program) != version:
                raise Refused(
                    f"{name} has {program} {here.get(program)}, but the source node has {version}"
                )

    def start(
        self, job_id: str, nodes: Sequence[str], left: str, name: str,
        sources: Sequence[BootSource], keeps: Callable[[], bool],
    ) -> None:  # fmt: skip
        if not isinstance(self.adapter, MigrationAdapter):
            batch_system = self.site.batch.system
            raise Refused(f"{batch_system} cannot reserve a node for a migrating guest")
        with job_lock(self.site.paths, job_id, 0):
            if find(self.site.paths, job_id):
                raise Refused(f"job {job_id} already holds resources on {name}")
            try:
                job = self.adapter.reserve_node(job_id, nodes, left, name)
                mine = job_context.attempt_of(job, job_context.job_user(job.owner, self.site))
                with log.open_log(log.Log(self.site.paths, mine, parse(self.site.log.level))):
                    _log.info("guests of job %s are arriving from another node", job.id)
                    start_job(job, self.site, self.plugins, self.adapter, arriving=sources)
                    names = [each.identity.hostname for each in sources if each.identity]
                    _log.info("%s: arrived", ", ".join(names))
            except BaseException:
                if not keeps():
                    release_attempts(job_id, self.site, self.plugins)
                    self.adapter.release_node(job_id, name)
                raise


def run_hook(config: Path) -> int:
    return run(*job_context.load_node(config), 0, 1)


def run(adapter: NodeAdapter, site: Site, plugins: Plugins, requests: int, answers: int) -> int:
    try:
        with helper_process():
            receiving = [n for n in plugins.names if "vtorque_receive" in plugins.hooks_of(n)]
            if len(receiving) != 1:
                raise Refused(
                    f"{len(receiving)} of this node's plugins receive migrating guests, and "
                    "exactly one is required (vtorque-survive): see [plugins] in the site config"
                )
            node = ReceivingJob(adapter, site, plugins, requests, answers)
            plugins.collect(hooks.vtorque_receive, node=node)
    except PluginError:
        log.log_defect("a migration to this node")
        return EXIT_FAILED
    except VtorqueError as error:
        sys.stderr.write(f"vtorque: {printable(str(error), 2000)}\n")
        return EXIT_FAILED
    return EXIT_OK
