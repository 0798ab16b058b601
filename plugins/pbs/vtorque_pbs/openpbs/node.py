"""OpenPBS adapter for root on a node, called by :mod:`vtorque_pbs.openpbs.hooks`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from vtorque_core.api import HostFault, Refused
from vtorque_core.api.batch_system import BatchJob, Detach, Outcome, PeerGuest
from vtorque_core.api.guest_context import ContextItem, EnvVar
from vtorque_core.api.node_job import Site
from vtorque_core.api.submission import from_token
from vtorque_pbs import convention as pbs
from vtorque_pbs import countable_resources
from vtorque_pbs.batch_commands import REQUEUE_TIME
from vtorque_pbs.job_records import Attributes
from vtorque_pbs.mixed_requests import JobPart, bare_nodes, openpbs_places, per_node
from vtorque_pbs.node import PATIENCE, PbsNode, is_job_id, is_one_part
from vtorque_pbs.qsub_dialect import OPENPBS
from vtorque_pbs.resources import hosts, parse_exec_host
from vtorque_pbs.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.setup_steps import Installation, SetupStep

_MANY = 10  # starts after which the server's counter is reset
_OMPTHREADS = re.compile(r"[^+]*:ompthreads=([1-9][0-9]{0,5})(?=[:+]|$)", re.ASCII)


class OpenPbsNode(PbsNode):
    """Implementation of :class:`vtorque_core.api.batch_system.NodeAdapter` for OpenPBS."""

    note = ("comment", "-C")
    online = "-r"

    def __init__(self, site: Site, settings: Settings) -> None:
        super().__init__(site, settings, OPENPBS)
        self._resource = f"resources_available.{settings.property}"

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Parse the ``name=value`` words from the ``execjob_begin`` hook."""
        given = dict(word.split("=", 1) for word in argv if "=" in word)
        if len(given) != len(argv) or not given.get("id") or not given.get("owner"):
            raise HostFault("the arguments are not those of vTorque's OpenPBS hook")
        where = re.sub(r":[0-9]+/", "/", given.get("exec_host", ""))  # vm:15002/0*2
        nodes, _ = hosts(where)
        node = self.own_name(nodes)
        if not node:
            where = where or "none"
            raise HostFault(f"job {given['id']} does not run on this node; its exec_host: {where}")
        if not given.get("request"):
            name = given.get("name", "")
            return BatchJob(given["id"], given["owner"], node, nodes, None, name=name)
        blob, bad = b"", ""
        try:
            blob = from_token(given["request"])
        except Refused as error:
            bad = str(error)
        vnodes = given.get("vnodes", "")
        places = [JobPart(*part, guests=True) for part in parse_exec_host(where)]
        try:
            placed = [(place.node, place.slots) for place in places]
            places = openpbs_places(given.get("select", ""), placed, self._settings.property)
        except Refused as error:
            bad = bad or str(error)
        its = [place.guests for place in places]
        nodes, _ = per_node(places)
        if node not in nodes:
            return BatchJob(given["id"], given["owner"], node, (node,), None)
        where = "+".join(compress(where.split("+"), its))
        vnodes = "+".join(compress(re.findall(r"\([^()]*\)", vnodes), its))
        shares = [share(vnodes, where, each) for each in nodes]
        cpus, mib = shares[nodes.index(node)]
        return BatchJob(
            id=given["id"],
            owner=given["owner"],
            node=node,
            nodes=nodes,
            blob=blob,
            attempt=max(int(given.get("run_count") or 1) - 1, 0),
            cpu_count=cpus,
            cpu_counts=tuple(count for count, _ in shares if count),
            mem_mib=mib,
            name=given.get("name", ""),
            resource_list={
                name: given[name]
                for name in ("select", "place", "interactive", "rerunable")
                if name in given
            },
            bad_request=bad,
            bare=bare_nodes(places),
            detach=Detach.AT_ONCE,
            patience=PATIENCE,
            whole_node=_is_exclusive(given.get("place", ""), vnodes),
            queue=given.get("queue", ""),
            account=given.get("account", ""),
            granted=countable_resources.openpbs_granted(
                node_chunks(vnodes, where, node), self._read_hook_data(given["id"])
            ),
        )

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Yield the context of :class:`PbsNode`, and the variables OMP_NUM_THREADS and NCPUS.

        Their value is the first guest's number of vCPUs or, if smaller, the first chunk's
        ``ompthreads``. As in OpenPBS, they override the user's values (src/resmom/start_exec.c).
        """
        yield from super().context(job, guests)
        threads, most = _OMPTHREADS.match(job.resource_list.get("select", "")), guests[0].slots
        count = str(min(int(threads[1]), most) if threads else most)
        yield EnvVar("OMP_NUM_THREADS", count)
        yield EnvVar("NCPUS", count)

    def _read_hook_data(self, job_id: str) -> bytes:
        place = self.home / "mom_priv/hooks/hook_data"
        try:
            return (place / job_id).read_bytes() if is_job_id(job_id) else b""
        except OSError:
            return b""

    def requeue_now(self, job: BatchJob, hook_waits: bool) -> int:
        """Ask the server to requeue the job now; return 1, the exit status of vTorque's program.

        OpenPBS does not requeue a job by an exit status, so ``hook_waits`` makes no difference.
        """
        self.commands.rerun(job.id, wait=REQUEUE_TIME)
        return 1

    def reset_arguments(self, job: BatchJob, outcome: Outcome) -> Sequence[str]:
        """Return qalter arguments that set the start counter back to 10 if it is higher.

        Without these arguments, the server would hold the job after 21 starts. Return no arguments
        unless the job waits for a resource that is in use.
        """
        many = outcome is Outcome.IN_USE and job.attempt >= _MANY
        return ("-W", f"run_count={_MANY}") if many else ()

    def set_mark(self, name: str, node: Attributes, healthy: bool) -> None:
        """Set the node's mark (a boolean resource)."""
        self.commands.run_checked("qmgr", "-c", f"set node {name} {self._resource} = {healthy}")

    def clear_mark(self, name: str, node: Attributes) -> None:
        """Unset the node's mark (a boolean resource)."""
        if self._resource in node:
            self.commands.run_checked("qmgr", "-c", f"unset node {name} {self._resource}")

    def is_marked(self, node: Attributes) -> bool:
        """Return whether the node's mark (a boolean resource) is true."""
        return node.get(self._resource) == "True"

    def restrict_to_node(self, job: Attributes, node: str) -> str:
        """Add ``host=NODE`` to the job's ``select``, which must have one chunk."""
        asked = job.get("Resource_List.select", "")
        if not re.match("(1:)?[a-z_]+=", asked) or not is_one_part(asked):
            raise Refused(
                f"a job with -l select={asked} cannot be requeued on this node: request one chunk"
            )
        words = [word for word in asked.split(":") if not word.startswith(("host=", "vnode="))]
        return f"select={':'.join(words)}:host={node}"

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return the steps that set up this node.

        They create the hooks and the mark (a boolean resource), and check that root is a manager of
        the server.
        """
        from vtorque_pbs.openpbs.setup import steps  # noqa: PLC0415 (not for every job)

        return steps(self, self._site, self._settings, place)


def share(vnodes: str, exec_host: str, node: str) -> tuple[int | None, int | None]:
    """Return a job's CPUs and MiB on one node; None for values that are unknown.

    ``vnodes`` is ``exec_vnode``, such as ``(vm:ncpus=2:mem=1048576kb)+(vmb:ncpus=1)``. Its chunks
    are in the order of ``exec_host``.
    """
    cpus = mib = 0
    for pairs in node_chunks(vnodes, exec_host, node):
        cpus += int(pairs["ncpus"]) if pairs.get("ncpus", "").isdecimal() else 0
        try:
            mib += pbs.mem_mib(pairs["mem"]) if "mem" in pairs else 0
        except ValueError:
            continue
    return cpus or None, mib or None


def node_chunks(vnodes: str, exec_host: str, node: str) -> Iterator[dict[str, str]]:
    """Yield a job's resources on each vnode of one node; see :func:`share`."""
    names = [part.partition("/")[0] for part in exec_host.split("+")]
    for name, chunk in zip(names, re.findall(r"\(([^()]*)\)", vnodes), strict=False):
        for part in chunk.split("+") if name == node else ():
            yield dict(word.split("=", 1) for word in part.split(":") if "=" in word)


def _is_exclusive(place: str, vnodes: str) -> bool:
    """Return whether no other job may use the job's hosts (pbs_resources(7B)).

    ``exclhost`` applies to hosts, ``excl`` to vnodes. A host may have several vnodes (``host[0]``).
    """
    words = place.split(":")
    return "exclhost" in words or ("excl" in words and "[" not in vnodes)


def create_node(site: Site) -> OpenPbsNode:
    """Return the node adapter for OpenPBS."""
    return OpenPbsNode(site, site[Settings])
