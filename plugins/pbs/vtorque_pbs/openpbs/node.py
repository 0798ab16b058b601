"""The node half of OpenPBS. As root, in the hooks that :mod:`vtorque_pbs.hooks` writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from vtorque_core.api import HostFault, Refused
from vtorque_core.api_batch import BatchJob, Outcome
from vtorque_core.api_node import Site
from vtorque_core.api_setup import Installation, SetupStep
from vtorque_core.api_submit import from_token
from vtorque_core.batch import pbs_convention as pbs
from vtorque_pbs.dialect import OPENPBS
from vtorque_pbs.node import NOTE, PbsNode, note_of
from vtorque_pbs.query import Attributes, openpbs_jobs
from vtorque_pbs.resources import hosts
from vtorque_pbs.settings import Settings
from vtorque_pbs.torque import parse_nodes


class OpenPbsNode(PbsNode):
    """See :class:`vtorque_core.api_batch.NodeAdapter`."""

    def __init__(self, site: Site, settings: Settings) -> None:
        super().__init__(site, settings, OPENPBS)

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Read what the ``execjob_begin`` hook gives: ``name=value`` words. Raises HostFault."""
        given = dict(word.split("=", 1) for word in argv if "=" in word)
        if len(given) != len(argv) or not given.get("id") or not given.get("owner"):
            raise HostFault("these are not the words of vTorque's OpenPBS hook")
        where = re.sub(r":[0-9]+/", "/", given.get("exec_host", ""))  # vm:15002/0*2
        nodes, _ = hosts(where)
        node = self.own_name(nodes)
        if not node:
            raise HostFault(f"job {given['id']} has no node of this name: {nodes}")
        if not given.get("request"):
            name = given.get("name", "")
            return BatchJob(given["id"], given["owner"], node, nodes, None, name=name)
        blob, bad = b"", ""
        try:
            blob = from_token(given["request"])
        except Refused as error:
            bad = str(error)
        cpus, mib = share(given.get("vnodes", ""), where, node)
        return BatchJob(
            id=given["id"],
            owner=given["owner"],
            node=node,
            nodes=nodes,
            blob=blob,
            attempt=max(int(given.get("run_count") or 1) - 1, 0),
            cpu_count=cpus,
            mem_mib=mib,
            name=given.get("name", ""),
            resource_list={
                name: given[name]
                for name in ("select", "place", "interactive", "rerunable")
                if name in given
            },
            bad_request=bad,
            detach=True,
            whole_node="excl" in given.get("place", "").split(":"),
        )

    def finish(self, job: BatchJob, outcome: Outcome, reason: str) -> int:
        """Have the server run the job elsewhere, or hold it, after a host fault.

        The code says only whether the job will be requeued: 1, else 0.
        """
        if not self.try_elsewhere(job, outcome, reason):
            return 0
        if job.resource_list.get("interactive", "0") not in ("0", "False", "None"):
            return 0
        try:
            if self.is_last_attempt(job):
                self.commands.tell("qhold", "-h", "s", job.id)
                self.log(job, f"held after {self._settings.attempts} starts: {reason}")
            self.commands.rerun(job.id)
        except HostFault as error:
            self.log(job, f"it cannot be run elsewhere: {error}")
            return 0
        return 1

    def mark(self, healthy: bool, reason: str) -> None:
        """Set or clear this node's resource, and its comment. Raises HostFault."""
        if not self._settings.property:
            raise HostFault("[plugin.pbs] property is empty: nodes have no mark")
        name, node = self.this_node()
        if self.is_marked(node) != healthy:
            self._set(name, "True" if healthy else "False")
        ours = node.get("comment", "").startswith(NOTE)
        if not healthy and (ours or not node.get("comment")):
            self.commands.tell("pbsnodes", "-C", note_of(reason), name)
        elif healthy and ours:
            self.commands.tell("pbsnodes", "-C", "", name)

    def unmark(self) -> None:
        """Take the mark away, and a comment of ours. Raises HostFault."""
        name, node = self.this_node()
        resource = f"resources_available.{self._settings.property}"
        if resource in node:
            self.commands.tell("qmgr", "-c", f"unset node {name} {resource}")
        if node.get("comment", "").startswith(NOTE):
            self.commands.tell("pbsnodes", "-C", "", name)

    def is_marked(self, node: Attributes) -> bool:
        """Return whether the node's resource is true."""
        return node.get(f"resources_available.{self._settings.property}") == "True"

    def nodes(self) -> Mapping[str, Attributes]:
        """Ask the server for its vnodes. Raises HostFault."""
        return parse_nodes(self.commands.tell("pbsnodes", "-av"))

    def ask(self, job_id: str, timeout: float = 30.0) -> Attributes | None:
        """Ask qstat. Raises HostFault."""
        answer = self.commands.ask("qstat", "-f", job_id, timeout=timeout)
        if answer.code == 0:
            jobs = openpbs_jobs(answer.out)
            return next((job for job in jobs if job["Job_Id"] == job_id), None)
        if re.search("Unknown Job Id|Job has finished", answer.err):
            return None
        raise HostFault(f"qstat ended with {answer.code}: {answer.words}")

    def setup_steps(self, place: Installation) -> Sequence[SetupStep]:
        """Return the two hooks, the resource and this node's, root's rights."""
        from vtorque_pbs.openpbs_setup import steps  # noqa: PLC0415 (not for every job)

        return steps(self, self._site, self._settings, place)

    def _set(self, name: str, value: str) -> None:
        what = f"resources_available.{self._settings.property}"
        self.commands.tell("qmgr", "-c", f"set node {name} {what} = {value}")


def share(vnodes: str, exec_host: str, node: str) -> tuple[int | None, int | None]:
    """Return the CPUs and MiB that a job has on one node, None where it is not said.

    ``vnodes`` is ``(vm:ncpus=2:mem=1048576kb)+(vmb:ncpus=1)``, chunk by chunk as ``exec_host``.
    """
    names = [part.partition("/")[0] for part in exec_host.split("+")]
    chunks = re.findall(r"\(([^()]*)\)", vnodes)
    cpus = mib = 0
    for name, chunk in zip(names, chunks, strict=False):
        for part in chunk.split("+") if name == node else ():
            pairs = dict(word.split("=", 1) for word in part.split(":") if "=" in word)
            cpus += int(pairs["ncpus"]) if pairs.get("ncpus", "").isdecimal() else 0
            try:
                mib += pbs.mem_mib(pairs["mem"]) if "mem" in pairs else 0
            except ValueError:
                continue
    return cpus or None, mib or None
