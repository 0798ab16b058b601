"""Query the current state of a job on its nodes with ``vmgr state``.

Code in a guest may answer for its node, so answers are untrusted and limited in time and size.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vtorque_core.api import HostFault, printable
from vtorque_core.api.batch_system import JobInfo, JobOnNode
from vtorque_core.live import service

T = TypeVar("T")
_MOST = 1 << 20  # bytes of an answer
_SPARE = 30.0  # seconds for a node to answer, in addition to the waits of two commands
AT_ONCE = 8  # nodes that are queried at a time


@dataclass(frozen=True)
class NodeState:
    """A job on one node.

    Attributes:
        phase: The job's phase.
        guests: Rank and name of each guest.
        elsewhere: Nodes outside the job's allocation to which guests of the job migrated: each
            node's name, and the job's state on it. The owner cannot query these nodes.
        image: Name of the guests' image; empty if unknown.
    """

    phase: str
    guests: tuple[tuple[int, str], ...]
    elsewhere: tuple[tuple[str, NodeState], ...] = ()
    image: str = ""

    def on_node(self, job_id: str, node: str) -> Iterator[JobOnNode]:
        """Yield the job's state on ``node``, then on each node to which its guests migrated."""
        for each, state in ((node, self), *self.elsewhere):
            names = tuple(name for _, name in state.guests)
            yield JobOnNode(job_id, each, state.phase, names, image=state.image)


def query_jobs(jobs: Sequence[JobInfo], config: Path, wait: float) -> Iterator[JobOnNode]:
    """Query, as the calling user, the state of each job on each of its nodes.

    ``wait`` is as in :func:`answer`. Several nodes are queried in parallel.
    """

    def ask(job_id: str, node: str) -> list[JobOnNode]:
        try:
            return list(query_node(job_id, node, config, wait).on_node(job_id, node))
        except HostFault as error:
            return [JobOnNode(job_id, node, error=str(error))]

    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = [threads.submit(ask, job.id, node) for job in jobs for node in job.nodes]
        for each in asked:
            yield from each.result()


def query_node(job_id: str, node: str, config: Path, wait: float) -> NodeState:
    """Return a job's state on one of its nodes. For ``wait`` see :func:`answer`."""
    return answer(_state, job_id, node, config, wait)


def _state(said: Any) -> NodeState:
    found = _parse_one(said)
    others = dict(said.get("elsewhere", {})).items()
    return replace(found, elsewhere=tuple((str(node), _parse_one(each)) for node, each in others))


def _parse_one(said: Any) -> NodeState:
    guests = tuple((int(guest["rank"]), str(guest["hostname"])) for guest in said["guests"])
    return NodeState(str(said["phase"]), guests, image=str(said.get("image", "")))


def answer(
    read: Callable[[Any], T], job_id: str, node: str, config: Path, wait: float, *options: str,
    most: int = _MOST,
) -> T:  # fmt: skip
    """Run ``vmgr state`` with ``options`` on a job's node, and parse its JSON with ``read``.

    ``wait`` is ``[plugin.login] answer_timeout`` in seconds. ``most`` limits the bytes of the
    answer.

    Raises:
        HostFault: The command failed, printed too much, or took more than twice ``wait`` plus 30 s.
    """
    argv = service.vmgr(config, "state", "--node", node, *options, "--", job_id)
    said, wrong = _run_answer(argv, node, 2 * wait + _SPARE, most)
    try:
        return read(json.loads(said))
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        text = printable(wrong.decode("utf-8", "replace").strip(), 500)
        raise HostFault(f"{node}: {text or 'no answer about the job'}") from None


def _run_answer(argv: Sequence[str], node: str, seconds: float, most: int) -> tuple[bytes, bytes]:
    until = time.monotonic() + seconds
    said = bytearray(), bytearray()
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child, selectors.DefaultSelector() as pipes:  # fmt: skip
        try:
            for pipe, data in zip((child.stdout, child.stderr), said, strict=True):
                assert pipe is not None  # noqa: S101 - PIPE
                pipes.register(pipe, selectors.EVENT_READ, data)
            while pipes.get_map():
                for key, _ in pipes.select(max(0.0, until - time.monotonic())):
                    part = os.read(key.fd, min(_MOST, most + 1 - len(key.data)))
                    key.data.extend(part)
                    if not part:
                        pipes.unregister(key.fileobj)
                    if len(key.data) > most:
                        raise HostFault(f"{node}: the job's state is larger than {most} bytes")
                if time.monotonic() >= until:
                    raise HostFault(
                        f"{node}: no answer within {seconds:g} s (twice [plugin.login] "
                        f"answer_timeout, plus {_SPARE:g} s). Check the load of {node}, and "
                        "whether the job still runs"
                    )
        finally:
            os.killpg(child.pid, signal.SIGKILL)  # not yet reaped, so the pid cannot be reused
    return bytes(said[0]), bytes(said[1])
