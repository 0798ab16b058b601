"""Answer requests from root on another node about guests that migrate between the nodes.

A request is one line of JSON on standard input. The answer goes to standard output. The site's
``remote_command`` determines who can send requests.

Privileges: root.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from typing import IO, Any

from vtorque_core.api import Busy, HostFault, UsageError
from vtorque_core.api.unprivileged_parser import helper_process
from vtorque_core.live import kept_jobs, libvirt, suspend
from vtorque_core.live.jobs import RunningJob
from vtorque_core.live.locked_job import LockedJob, locked_job
from vtorque_survive import domains, guest_migration, migrate_disk, migration_record, request
from vtorque_survive.clocks import set_clocks
from vtorque_survive.migration import ThisNode
from vtorque_survive.migration_record import ELSEWHERE, outside_nodes

MOST = 1 << 16  # bytes of a request line
_WAIT = 45.0  # seconds for this node's watcher; the requester waits longer
log = logging.getLogger(__name__)
_KEY = re.compile(r"[A-Za-z0-9_.+\[\]-]+")


def answer(here: ThisNode, question: bytes, more: IO[bytes], first: IO[bytes]) -> bytes:
    """Return the answer to one request.

    Args:
        here: This node.
        question: The line with the request.
        more: The input stream after that line.
        first: The output stream, for the acknowledgements of :func:`.migrate_disk.receive`.

    Raises:
        UsageError: If the request is invalid.
        HostFault: If the request failed.
    """
    try:
        asked: dict[str, Any] = json.loads(question)
        what, job_id, key = str(asked["ask"]), str(asked["job"]), str(asked["key"])
        if not _KEY.fullmatch(key) or key.rpartition(".")[0] != job_id:
            raise ValueError(key)
        if what == "resolve":
            theirs = {str(uuid): str(does) for uuid, does in asked["guests"].items()}
            said: Any = resolve_guests(here, job_id, key, str(asked["node"]), theirs)
        elif what == "disk":
            uuid, awaited = str(asked["guest"]), partial(_is_awaited, here, key)
            said = migrate_disk.receive(here.paths, here.node.uri, key, uuid, awaited, more, first)
        elif what == "gone":
            said = record_departure(here, key, str(asked["node"]), str(asked["to"]), _guests(asked))
        elif what == "phase":
            state = {"phase": str(asked["phase"]), "guests": _guests(asked)}
            said = record_state(here, key, str(asked["node"]), state)
        elif what in (request.SUSPEND, request.RESUME):
            said = suspend_or_resume(here, key, what)
        else:
            raise ValueError(what)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"unknown request from another node (do both run the same version of vTorque?): {error}"
        ) from None
    return json.dumps({"answer": said}).encode() + b"\n"


def _guests(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"rank": int(g["rank"]), "hostname": str(g["hostname"])} for g in asked["guests"]]


def resolve_guests(
    here: ThisNode, job_id: str, key: str, node: str, theirs: Mapping[str, str]
) -> dict[str, str]:
    """Return which guests of a migration this node owns, in answer to the source node.

    The source asks when its libvirt has finished the migration. ``theirs`` maps each UUID to the
    guest's state on the source. The answer maps each UUID to ``here`` (on this node), ``none`` (not
    on this node), or ``comes`` (undecided: ask again).

    - This node owns a guest that has run on this node, even if the guest has ended: a paused copy
      on the source is older.
    - While a guest runs on the source, a paused copy on this node is a leftover of libvirt and is
      ended.
    - A guest with its own disk is paused on both nodes. It is resumed on this node only after the
      source has ended its copy.

    If all answers are ``none``, this node releases the resources of these guests, but not of other
    guests of the job on this node.
    """
    try:
        with locked_job(here.paths, key) as locked:
            disks, come = guest_migration.disks(here.paths, key), locked.domains if locked else {}
            said = {
                uuid: _guest_state(here, uuid, does, come, with_disk=uuid in disks)
                for uuid, does in theirs.items()
            }
            if "comes" in said.values():
                return said
            if locked and "here" in said.values():
                return _complete_arrival(here, job_id, locked, said)
            if come and not come.keys() & theirs.keys():
                return said
            here.adapter.release_node(job_id, node)
    except Busy:  # a start, which may wait for these guests, or a release
        return dict.fromkeys(theirs, "comes")
    if locked:
        here.release(job_id)
    return said


def _guest_state(
    here: ThisNode, uuid: str, theirs: str, known: Mapping[str, bool], *, with_disk: bool
) -> str:
    state, came = domains.domain_state(here.node.uri, uuid), known.get(uuid)
    if came or (came is not None and state == "runs"):
        return "here"
    if with_disk and state == "still":
        try:
            guest_migration.await_state(here.node.uri, uuid, 0.0)  # libvirt has finished
        except HostFault:
            return "comes"
        if not theirs:
            libvirt.resume_domain(here.node.uri, uuid)
        return "none" if theirs else "here"
    if state == "runs" or (state and theirs != "runs"):
        return "comes"
    return "none"


def _complete_arrival(
    here: ThisNode, job_id: str, locked: LockedJob, said: dict[str, str]
) -> dict[str, str]:
    """Complete the job's start on this node after an interrupted arrival of guests.

    ``said``, which is also returned, maps each UUID to the answer for the source node.
    """
    job, key = here.job(job_id), locked.state.key
    if job is None or job.job.key != key or suspend.phase(job) == "":
        for uuid in [uuid for uuid, where in said.items() if where == "none"]:
            libvirt.destroy_domain(here.node.uri, uuid)
        guest_migration.complete_arrival(
            locked, [uuid for uuid, where in said.items() if where == "here"]
        )
        migration_record.forget(here.paths, key)  # of an earlier migration from this node
        if (now := here.job(job_id)) is not None:
            with kept_jobs.logging_for(here.paths, now.job):
                log.warning(
                    "the start on this node was interrupted: the plugins' post-boot hooks are "
                    "skipped"
                )
            with helper_process():
                set_clocks(here.paths, now).wait()
    return said


def record_departure(
    here: ThisNode, key: str, node: str, to: str, guests: list[dict[str, Any]]
) -> str:
    """Record that guests of a job have migrated to the node ``to``, when the source node asks.

    Args:
        here: This node, another node of the job.
        key: The job's key.
        node: The source node, which ``to`` replaces in the job's list of nodes. If other guests of
            the job stay on the source node, ``node`` is empty and the list does not change.
        to: The destination node.
        guests: Rank and hostname of each migrated guest, which only the job's first node records.
            For other nodes, the list is empty.

    Returns:
        The answer to the source node, which is always ``noted``.
    """
    if job := _job(here, key):
        nodes = [to if each == node else each for each in job.kept.facts().get("nodes", ())]
        there = {other: each for other, each in outside_nodes(job).items() if other != node}
        # The destination may have reported this already, if the sender was killed.
        if guests and all(each["guests"] != guests for each in there.values()):
            there[to] = {"phase": suspend.RUNS, "guests": guests}
        job.kept.add_facts(nodes=nodes, **{ELSEWHERE: there})
    return "noted"


def record_state(here: ThisNode, key: str, node: str, state: dict[str, Any]) -> str:
    """Record, on the job's first node, the state of guests that have migrated to ``node``.

    ``node`` is outside the job's allocation, and sends ``state``: the job's phase on ``node``, and
    the guests.

    Returns the answer to ``node``, which is always ``noted``.
    """
    if job := _job(here, key):
        others = outside_nodes(job).items()  # drop earlier places of these guests
        there = {other: each for other, each in others if each["guests"] != state["guests"]}
        job.kept.add_facts(**{ELSEWHERE: {**there, node: state}})
    return "noted"


def suspend_or_resume(here: ThisNode, key: str, word: str) -> str:
    """Suspend or resume a guest that migrated here, on request of the job's owner.

    Returns an error message, empty on success.
    """
    job = _job(here, key)
    if job is None:
        raise HostFault("the job has no guest on this node")
    return request.ask(request.path_of(here.paths, key), job.kept, word, _WAIT)


def _is_awaited(here: ThisNode, key: str) -> bool:
    job = _job(here, key)
    return job is not None and job.phases[-1][0] == "arrives"


def _job(here: ThisNode, key: str) -> RunningJob | None:
    job = here.job(key.rpartition(".")[0])
    return job if job is not None and job.job.key == key else None
