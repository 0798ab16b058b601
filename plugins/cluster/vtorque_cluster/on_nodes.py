"""Run a command on many nodes by ssh, through ClusterShell. Runs as root on one host.

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

from vtorque_core.api import UsageError, name_errors

CONNECT_TIMEOUT = 10.0  # seconds for ssh to connect to a node
COMMAND_TIMEOUT = 600.0  # seconds for the command on one node
_LINES = 20  # lines of one node's output that are shown


@dataclass(frozen=True)
class NodesAnswer:
    """Several nodes with the same exit status and output of a command.

    Attributes:
        nodes: The nodes' names as a node set: ``n[1-3],m7``.
        count: The number of nodes.
        code: The exit status; None after a timeout.
        text: The end of standard error if the command failed, otherwise of standard output.
    """

    nodes: str
    count: int
    code: int | None
    text: str

    @property
    def ok(self) -> bool:
        """True if the command succeeded."""
        return self.code == 0


def nodes_of(text: str) -> list[str]:
    """Return the names in a node set such as ``n[1-3],m7``."""
    with name_errors(f"--nodes {text}", NodeSetException, fault=UsageError):
        names = [str(name) for name in NodeSet(text)]
    if not names:
        raise UsageError(f"--nodes {text}: contains no node")
    if option := next((name for name in names if name.startswith("-")), None):
        raise UsageError(f"--nodes: {option} is not a valid node name")
    return names


def fold(names: Sequence[str]) -> str:
    """Return the names as one node set."""
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
) -> list[NodesAnswer]:
    """Run a command on each node. Return the results, failures first; equal results are merged.

    Args:
        nodes: Host names for ssh.
        argv: The command, which is quoted for the remote login shell.
        stdin: Standard input. Pass secrets here, not in ``argv``, which other users can list.
        fanout: Number of nodes at a time.
        ended: Called with a node and an exit status (None: timeout) when the command has ended.
        seconds: Timeout on one node.
        whole: Return all of standard output, even if the command fails.
    """
    codes: dict[str, int | None] = dict.fromkeys(nodes)
    lines: dict[str, list[str]] = {node: [] for node in nodes}
    errors: dict[str, list[str]] = {node: [] for node in nodes}

    class Handler(EventHandler):  # type: ignore[misc]
        """A collector of output and exit status, called by ClusterShell in :func:`run`'s thread."""

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
    # Nodes differ in the steps before the failure, but the failure itself is often the same.
    output = {n for n in codes if codes[n] == 0 or not errors[n] or (whole and lines[n])}
    told = {n: lines[n] if n in output else errors[n] for n in codes}
    return merge_answers(codes, told if whole else {n: said[-_LINES:] for n, said in told.items()})


def merge_answers(
    codes: Mapping[str, int | None], lines: Mapping[str, Sequence[str]]
) -> list[NodesAnswer]:
    """Merge nodes with equal exit status and output; return failures first.

    Args:
        codes: Each node's exit status; None after a timeout.
        lines: Each node's output.
    """
    alike: dict[tuple[int | None, str], list[str]] = {}
    for node, code in codes.items():
        text = "\n".join(lines[node])
        alike.setdefault((code, text), []).append(node)
    answers = [
        NodesAnswer(fold(nodes), len(nodes), code, text) for (code, text), nodes in alike.items()
    ]
    return sorted(answers, key=lambda answer: (answer.ok, answer.nodes))
