"""Nodes and queued jobs of Torque and OpenPBS, read and changed with their commands.

Torque: ``pbsnodes -x``, ``qstat -x``, pbsnodes(8), qmgr(1B). OpenPBS: ``pbsnodes -F json``,
``qstat -f -w``. Job lists can contain text of users that is not valid XML or JSON. Therefore jobs
are parsed one by one, and unreadable jobs are skipped.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vtorque_core.api import HostFault, name_errors, run_tool
from vtorque_pool.settings import Settings
from vtorque_pool.slurm import REASON, TOLD, PoolNode, State

_OFF = f"{REASON}: off"
_NONE = "Server has no node list"  # pbs_error_db.h of Torque and OpenPBS
_GONE = ("Unknown node", "cannot locate specified node", "Error in node list")


@dataclass(frozen=True)
class QueuedJob:
    """A queued job: its queue, account, and requested nodes, CPUs per node and node features."""

    id: str
    queue: str
    nodes: int
    cpus: int
    features: frozenset[str] = frozenset()
    account: str = ""


class Pbs:
    """The commands of Torque or OpenPBS. Privileges: root, on the server's host."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open = settings.batch == "openpbs"

    def nodes(self) -> dict[str, PoolNode]:
        """Return the pool's nodes in the batch system, by name.

        The result omits nodes that :meth:`delete` has set offline on Torque.
        """
        there = {name: _node(name, each) for name, each in self._query_nodes().items()}
        return {name: node for name, node in there.items() if not _is_off(node)}

    def _query_nodes(self) -> dict[str, dict[str, str]]:
        wanted = {name for shape in self._settings.shapes for name in shape.names}
        said = self._open_nodes() if self._open else self._torque_nodes()
        return {name: each for name, each in said.items() if name in wanted}

    def make_known(self) -> list[str]:
        """Create all nodes of the pool in Torque, even without a machine; return the errors.

        Torque must know the nodes that a job needs. Otherwise qsub refuses the job (svr_jobfunc.c,
        "cannot locate feasible nodes"), or pbs_sched deletes it (fifo.c).
        """
        failed: list[str] = []
        if self._open:
            return failed
        said = self._query_nodes()
        for shape in self._settings.shapes:
            for name in shape.names:
                try:
                    if name not in said:
                        self._make(name, shape.cpus, shape.features)
                except HostFault as error:
                    failed.append(f"{name}: unknown to Torque: {error}")
        return failed

    def _torque_nodes(self) -> dict[str, dict[str, str]]:
        text = self._run("pbsnodes", "-x", but=(*_GONE, _NONE, "No nodes found"))
        return {
            _field(each, "name"): {name: _field(each, name) for name in ("state", "jobs", "note")}
            for each in _parts(text, "Node")
        }

    def _open_nodes(self) -> dict[str, dict[str, str]]:
        text = self._run("pbsnodes", "-a", "-F", "json", but=(_NONE,))
        return {
            name: {
                "state": str(each.get("state", "")),
                "jobs": ", ".join(each.get("jobs", ())),
                "note": str(each.get("comment", "")),
            }
            for name, each in _json(text).get("nodes", {}).items()
        }

    def queued_jobs(self) -> list[QueuedJob]:
        """Return the queued jobs in the server's order, without held jobs."""
        if self._open:
            jobs = _open_jobs(self._run("qstat", "-f", "-w", "-t"))
        else:
            jobs = [_torque_job(part) for part in _parts(self._run("qstat", "-t", "-x"), "Job")]
        found = []
        for job in jobs:  # qstat lists arrays and their elements
            if job.get("job_state") == "Q" and "[]" not in job["Job_Id"]:
                with contextlib.suppress(ValueError):
                    found.append(_open_waiting(job) if self._open else _torque_waiting(job))
        return found

    def create(self, node: str, cpus: int, features: Iterable[str], address: str) -> None:
        """Create a node that accepts jobs once it is up. The server must resolve the node's name.

        If the node's previous machine was up, Torque would consider the node up for
        ``node_check_rate``, and send jobs to a booting machine. Therefore the node is set ``down``
        until pbs_mom's first message.
        """
        self._make(node, cpus, features, address)
        if not self._open:
            self._run("qmgr", "-c", f"set node {node} state = down")
            self.undrain(node)

    def _make(self, node: str, cpus: int, features: Iterable[str], address: str = "") -> None:
        """Create a node with all attributes in one command, so that it never lacks an attribute."""
        if self._open:
            at = f"mom={address}," if address else ""
            has = f"{at}resources_available.ncpus={cpus}"
        else:
            listed = ",".join(features)
            has = f"np={cpus}" + (f',properties="{listed}"' if listed else "")
        self._run("qmgr", "-c", f"create node {node} {has}", but=("exists",))

    def delete(self, node: str) -> None:
        """Delete a node; on Torque, set it offline. Idempotent.

        For about 20 s after a node's creation, Torque ignores changes of the node: pbsnodes prints
        an error, but exits with 0. ``vtorque pool serve`` later repeats the change.
        """
        if self._open:
            self._run("qmgr", "-c", f"delete node {node}", but=_GONE)
        else:
            self._run("pbsnodes", "-o", node, "-N", _OFF)

    def drain(self, node: str, why: str) -> None:
        """Set a node offline. The note contains ``why``, after the pool's prefix."""
        note = f"{REASON}: {why}"
        if self._open:  # pbsnodes -o requires a host name, but the node's mom may be an address
            note = note.replace('"', "'")
            self._run("qmgr", "-c", f'set node {node} state+=offline,comment="{note}"')
        else:
            self._run("pbsnodes", "-o", node, "-N", note)

    def undrain(self, node: str) -> None:
        """Return a node to service."""
        if self._open:
            self._run("qmgr", "-c", f'set node {node} state-=offline,comment=""')
        else:
            self._run("pbsnodes", "-c", node, "-N", "n")

    def requeue(self, jobs: Iterable[str]) -> None:
        """Requeue jobs, including jobs submitted with ``qsub -r n``."""
        for job in jobs:
            if self._open:
                self._run("qrerun", "-W", "force", job, but=("Unknown",))
            else:  # Torque reports "not rerunnable" for such a job, even with -f (req_rerun.c)
                self._run("qalter", "-r", "y", job, but=("Unknown",))
                self._run("qrerun", "-f", job, but=("Unknown",))

    def power_down(self, nodes: Iterable[str], *, at_once: bool) -> None:
        """Drain nodes; with ``at_once``, also requeue their jobs and delete the nodes."""
        there = self.nodes()
        for node in nodes:
            if node not in there:
                continue
            self.drain(node, TOLD)
            if at_once:
                self.requeue(there[node].jobs)
                self.delete(node)

    def _run(self, tool: str, *words: str, but: tuple[str, ...] = ()) -> str:
        """Return a command's output; empty if its error message contains a text in ``but``.

        Raises HostFault for other errors.
        """
        program = f"{self._settings.bindir}/{tool}" if self._settings.bindir else tool
        try:
            return run_tool(program, *words, timeout=self._settings.timeout)
        except HostFault as error:
            if any(word in str(error) for word in but):
                return ""
            raise


def _node(name: str, said: Mapping[str, str]) -> PoolNode:
    words = {word.strip() for word in said["state"].split(",")}
    jobs = tuple(dict.fromkeys(_job(word) for word in said["jobs"].split(",") if word.strip()))
    note = said["note"]
    state: State
    if words & {"down", "state-unknown", "stale"}:
        state = "unusable"
    elif "offline" in words:
        state = "draining"
    else:
        state = "busy" if jobs else "free"
    return PoolNode(name, state, note, jobs)


def _is_off(node: PoolNode) -> bool:
    return node.state in {"draining", "unusable"} and node.reason == _OFF and not node.jobs


def _job(word: str) -> str:
    """Return the job id in ``0/12.srv``, ``0-1/12.srv`` (Torque) or ``12.srv/0`` (OpenPBS)."""
    first, _, last = word.strip().partition("/")
    return first if not last or last.isdecimal() else last


def _parts(text: str, name: str) -> list[str]:
    """Return the contents of all XML elements with this name in Torque's output.

    Raises HostFault if the output is truncated. Values never contain ``<`` (u_MXML.c replaces it),
    so users' text cannot forge an element.
    """
    if text.strip() and not text.rstrip().endswith(("</Data>", "<Data/>")):
        raise HostFault("truncated answer of the batch system: it does not end with </Data>")
    return [part.partition(f"</{name}>")[0] for part in text.split(f"<{name}>")[1:]]


def _field(part: str, name: str) -> str:
    found = re.search(f"<{name}>([^<]*)</{name}>", part)
    return found[1] if found else ""


def _torque_job(part: str) -> dict[str, str]:
    asked = part.partition("<Resource_List>")[2].partition("</Resource_List>")[0]
    names = ("Job_Id", "job_state", "queue", "Account_Name")
    return {**{name: _field(part, name) for name in names}, "asked": _field(asked, "nodes")}


def _open_jobs(text: str) -> list[dict[str, str]]:
    r"""Return the attributes of each job in the output of OpenPBS's ``qstat -f -w``.

    With ``-w``, each attribute is one line. A newline in a value appears as ``\n`` (qstat.c,
    convert_feed_chars), so user text cannot forge a line.
    """
    found: list[dict[str, str]] = []
    for line in text.split("\n"):
        if line.startswith("Job Id: "):
            found.append({"Job_Id": line[8:]})
        elif found and line.startswith("    "):
            name, _, value = line.strip().partition(" = ")
            found[-1][name] = value
    return found


def _torque_waiting(job: Mapping[str, str]) -> QueuedJob:
    nodes, cpus, features = 0, 1, set()
    for part in (job["asked"] or "1").partition("#")[0].split("+"):
        first, *words = part.split(":")
        nodes += _count(first) if first.isdecimal() else 1
        words += [] if first.isdecimal() else [first]  # a node's name, or a property
        for word in words:
            if word.startswith("ppn="):
                cpus = max(cpus, _count(word[4:]))
            elif "=" not in word:
                features.add(word)
    account = job["Account_Name"]
    return QueuedJob(job["Job_Id"], job["queue"], nodes, cpus, frozenset(features), account)


def _open_waiting(job: Mapping[str, str]) -> QueuedJob:
    nodes, cpus = 0, 1
    for part in job.get("Resource_List.select", "1:ncpus=1").split("+"):
        words = part.split(":")
        nodes += _count(words[0]) if words[0].isdecimal() else 1
        for word in words:
            if word.startswith(("host=", "vnode=")):
                raise ValueError("the job requests a node by name (host= or vnode=)")
            if word.startswith("ncpus="):
                cpus = max(cpus, _count(word[6:]))
    account = job.get("Account_Name", "")
    return QueuedJob(job["Job_Id"], job.get("queue", ""), nodes, cpus, account=account)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII):
        raise ValueError(text)
    return int(text)


def _json(text: str) -> dict[str, Any]:
    with name_errors("truncated answer of the batch system", ValueError):
        found = json.loads(text or "{}", strict=False)
    return found if isinstance(found, dict) else {}
