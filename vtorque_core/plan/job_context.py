"""Context of a job's planner: job, user, site, plugins and hardware. As root on the node."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass, replace
from pathlib import Path

from vtorque_core.api.batch_system import BatchJob, NodeAdapter
from vtorque_core.api.guest_plan import JobUser
from vtorque_core.api.host_topology import Topology
from vtorque_core.base import names
from vtorque_core.base.errors import ConfigError, HostFault, Refused
from vtorque_core.base.trust import require_secret
from vtorque_core.config import directories
from vtorque_core.config.job_size import JobGrant
from vtorque_core.config.load import load
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import groups_of
from vtorque_core.config.site_config import Site
from vtorque_core.plan import host_ids
from vtorque_core.plan.placement import model, node_hardware


@dataclass(frozen=True)
class JobContext:
    """The planner's information about a job, the site and the node.

    Attributes:
        site: config with the limits of this job (:func:`vtorque_core.config.policy.for_job`).
        machine: the node's hardware; None on a submit host.
        granted: resources that the batch system granted on this node.
    """

    job: BatchJob
    user: JobUser
    site: Site
    plugins: Plugins
    secret: bytes
    machine: Topology | None = None
    granted: JobGrant = JobGrant()

    @property
    def attempt(self) -> names.JobAttempt:
        return attempt_of(self.job, self.user)


def load_secret(path: Path) -> bytes:
    try:
        require_secret(path, os.geteuid())
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (ConfigError, OSError) as error:
        raise HostFault(f"site secret: {error}; run vtorque setup install") from None
    with os.fdopen(descriptor, "rb") as file:
        secret = file.read(4096)
    if len(secret) < 32:
        raise HostFault(f"site secret {path} has {len(secret)} bytes; it needs 32 or more")
    return secret


def job_user(name: str, site: Site) -> JobUser:
    """Return the job's owner from this node's user database. Refuses root."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise HostFault(f"user {name!r} is unknown on this node") from None
    if entry.pw_uid == 0:
        raise Refused("jobs of root do not run in guests; submit as an ordinary user")
    first, uid = site.node.subordinate_ids, entry.pw_uid
    return JobUser(
        name=entry.pw_name,
        uid=uid,
        gid=entry.pw_gid,
        home=entry.pw_dir,
        shell=entry.pw_shell or "/bin/sh",
        subordinate_id=0 if site.owner else host_ids.root_id(name, uid, first),
        groups=groups_of(name, entry.pw_gid),
    )


def attempt_of(job: BatchJob, user: JobUser) -> names.JobAttempt:
    return names.JobAttempt(job.id, job.attempt, user.name, user.uid, job.node)


def whole_node(site: Site) -> model.NodeShare:
    """Return the node's hardware, and the part that is reserved for the host."""
    return model.NodeShare(
        machine=node_hardware.topology(site.node.libvirt_uri),
        reserve_cores=site.node.host_reserve_cores,
        reserve_mib=site.node.host_reserve_ram,
    )


def node_share(job: BatchJob, site: Site) -> model.NodeShare:
    return replace(
        whole_node(site),
        cpus=job.cpus,
        cpu_count=job.cpu_count,
        mem_mib=job.mem_mib,
        exclusive=site.node.exclusive and not (job.whole_node or job.whole_user),
        whole_node=job.whole_node,
        numa=None if site.node.numa == "none" else site.node.numa,
    )


def load_node(path: Path) -> tuple[NodeAdapter, Site, Plugins]:
    """Return the batch system's adapter, config and plugins, for a hook that starts guests.

    Creates directories that a reboot removed. Privileges: root.
    """
    site, plugins = load(path, node=True)
    directories.make_missing(site)
    return plugins.batch_system(site.batch.system).node(site), site, plugins
