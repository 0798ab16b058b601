"""The same command on many nodes at once, by ssh, through ClusterShell. As root on one host.

See https://clustershell.readthedocs.io, "Programming Guide".
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ClusterShell.Event import EventHandler
from ClusterShell.NodeSet import NodeSet, NodeSetException
from ClusterShell.Task import task_self

from vtorque_core.api import UsageError

CONNECT_TIMEOUT = 10.0  # seconds for ssh to get through to a node
COMMAND_TIMEOUT = 600.0  # seconds for the command on one node
_LINES = 20  # of one node's output are shown


@dataclass(frozen=True)
class Answer:
    """What some nodes have said alike.

    Args:
        nodes: their names, folded: ``n[1-3],m7``.
        count: how many they are.
        code: the exit code; None: the time was up.
        text: what went wrong, as stderr has it; else the output.
    """

    nodes: str
    count: int
    code: int | None
    text: str

    @property
    def ok(self) -> bool:
        """Whether the command ended well there."""
        return self.code == 0


def nodes_of(text: str) -> list[str]:
    """Return the node names of a node set such as ``n[1-3],m7``. Raises UsageError."""
    try:
        names = [str(name) for name in NodeSet(text)]
    except NodeSetException as error:
        raise UsageError(f"--nodes {text}: {error}") from None
    if not names:
        raise UsageError(f"--nodes {text}: names no node")
    if option := next((name for name in names if name.startswith("-")), None):
        raise UsageError(f"--nodes: {option} is no node's name")
    return names


def fold(names: Sequence[str]) -> str:
    """Return names as one node set."""
    return str(NodeSet.fromlist(names))


def run(
    nodes: Sequence[str],
    argv: Sequence[str],
    stdin: bytes,
    fanout: int,
    ended: Callable[[str, int | None], None],
    seconds: float = COMMAND_TIMEOUT,
    *,
    whole: bool = False,
) -> list[Answer]:
    """Run ``argv`` on each node; return what they said, equal answers together, failures first.

    Args:
        nodes: host names that ssh knows.
        argv: the command; the remote login shell gets it quoted.
        stdin: what each command reads. It is in no argument, environment or file.
        fanout: how many nodes at a time.
        ended: called with each node and its exit code (None: time-out) as it ends.
        seconds: for the command on one node.
        whole: the output is what is wanted, all of it, however the command ends.
    """
    codes: dict[str, int | None] = dict.fromkeys(nodes)
    lines: dict[str, list[str]] = {node: [] for node in nodes}
    errors: dict[str, list[str]] = {node: [] for node in nodes}

    class Handler(EventHandler):  # type: ignore[misc]
        """Collects; ClusterShell calls it in this thread."""

        def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
            said = errors if sname == worker.SNAME_STDERR else lines
            said[node].append(msg.decode(errors="replace"))

        def ev_hup(self, worker: Any, node: str, rc: int) -> None:
            codes[node] = rc
            ended(node, rc)

        def ev_close(self, worker: Any, timedout: bool) -> None:
            for node in worker.iter_keys_timeout():
                ended(str(node), None)

    task = task_self()
    task.set_default("auto_tree", False)
    task.set_default("stderr", True)
    task.set_info("fanout", fanout)
    task.set_info("connect_timeout", CONNECT_TIMEOUT)
    command, where = shlex.join(argv), ",".join(nodes)
    worker = task.shell(command, nodes=where, handler=Handler(), timeout=seconds)
    if stdin:
        worker.write(stdin)
    worker.set_write_eof()
    task.resume()
    # Steps that were done before differ; what failed is often the same.
    output = {n for n in codes if codes[n] == 0 or not errors[n] or (whole and lines[n])}
    told = {n: lines[n] if n in output else errors[n] for n in codes}
    return together(codes, told if whole else {n: said[-_LINES:] for n, said in told.items()})


def together(codes: Mapping[str, int | None], lines: Mapping[str, Sequence[str]]) -> list[Answer]:
    """Return what nodes have said, equal answers together, failures first.

    Args:
        codes: each node's exit code; None: its time was up.
        lines: what each has said.
    """
    alike: dict[tuple[int | None, str], list[str]] = {}
    for node, code in codes.items():
        text = "\n".join(lines[node])
        alike.setdefault((code, text), []).append(node)
    answers = [Answer(fold(nodes), len(nodes), code, text) for (code, text), nodes in alike.items()]
    return sorted(answers, key=lambda answer: (answer.ok, answer.nodes))
