"""Setup steps and checks for OpenPBS. Privileges: root.

The server sends its hooks to all nodes, and only root on the server's host can see and change hooks
(req_manager.c, is_local_root). Setup on the server's host creates the hooks, even if the host is
not a node. Uninstall on the server's host removes the hooks, unless a node still has vTorque's
resource. Setup on other nodes only checks that the hooks exist.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_admin.steps import Change, Check, check_timeout
from vtorque_core.api import HostFault
from vtorque_core.api.node_job import Site
from vtorque_core.api.setup_steps import Installation, SetupStep
from vtorque_pbs.node import PbsNode
from vtorque_pbs.openpbs import hooks
from vtorque_pbs.settings import Settings
from vtorque_pbs.setup import mark_step, rights
from vtorque_pbs.submitter import REQUEST

BEGIN, END, QUEUE = "vtorque_begin", "vtorque_end", "vtorque_queue"


def steps(
    node: PbsNode, site: Site, settings: Settings, place: Installation
) -> Sequence[SetupStep]:
    """Return the steps in order. The last step makes the node accept VM jobs."""
    seconds = math.ceil(settings.epilogue_alarm)
    end = hooks.end(place, site.paths.journal, site.paths.run / "proof", seconds - 10)
    own = (
        ServerHook(node, BEGIN, "execjob_begin", hooks.begin(place), hooks.ALARM, hooks.ORDER),
        ServerHook(node, END, "execjob_end", end, seconds, 1),
    )
    at_server, is_node = _place(node)
    where = node.home / "mom_priv"
    missing = f"{where} does not exist: if PBS_HOME is elsewhere, set [plugin.pbs] home"
    found: list[SetupStep] = [
        Check(f"find {where}", "" if where.is_dir() or not is_node else missing),
        check_timeout(
            "[plugin.pbs] epilogue_alarm", seconds, place.end_time + 20, "the end of a job"
        ),
        rights(node.commands),
        *(own if at_server else (_check_hook_copy(each, where / "hooks") for each in own)),
    ]
    if at_server:
        found += _queue_steps(node, settings, place)
    if settings.property:
        if at_server:
            found.append(_resource(node, settings.property))
        if is_node:
            found.append(mark_step(node, settings.property))
    return found


def _queue_steps(node: PbsNode, settings: Settings, place: Installation) -> Iterator[SetupStep]:
    """Yield the steps that create the ``queuejob`` hook or, without ``vm_queues``, delete it."""
    if not settings.vm_queues:
        hook = ServerHook(node, QUEUE, "queuejob", b"", hooks.ALARM, hooks.ORDER)
        if hook.exists():
            yield Change(
                f"delete the hook {QUEUE}", lambda: not hook.exists(), hook.undo, hook.undo
            )
        return
    found, problems = {}, []
    vsub = place.program.with_name("vsub")
    for entry in settings.vm_queues:
        name, _, options = entry.partition(":")
        argv = [vsub, "--config", place.config, REQUEST, *(("-vm", options) if options else ())]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
            said, code = done.stdout, done.returncode
            problem = done.stderr.strip() or "this requests no virtual machine: add :KEY=VALUE"
        except (OSError, subprocess.TimeoutExpired) as error:
            said, code, problem = "", 1, str(error)
        if code or not said:
            problems.append(f"[plugin.pbs] vm_queues {entry}: {problem}")
        else:
            found[name] = json.loads(said)
    yield Check("requests of [plugin.pbs] vm_queues", "; ".join(problems))
    content = hooks.queue(found, settings.property, place.jobshell)
    yield ServerHook(node, QUEUE, "queuejob", content, hooks.ALARM, hooks.ORDER)


def _place(node: PbsNode) -> tuple[bool, bool]:
    """Return whether this host runs the server and whether it is a node; assume both if unknown."""
    try:
        answer = node.commands.ask("qmgr", "-c", f"list hook {BEGIN}")
        at_server = "unauthorized to access hooks" not in answer.err
        return at_server, not at_server or bool(node.own_name(node.nodes()))
    except HostFault:
        return True, True


def _check_hook_copy(hook: ServerHook, directory: Path) -> Check:
    problem = ""
    try:
        said = (directory / f"{hook.name}.HK").read_text()
        has = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        numbers = has.get("alarm", "30"), has.get("order", "1")
        if has.get("event") != hook.event or numbers != (str(hook.alarm), str(hook.order)):
            problem = "has different settings"
        elif has.get("enabled", "true") != "true":
            problem = "is not enabled"
        elif (directory / f"{hook.name}.PY").read_bytes() != hook.content:
            problem = "was written by another version of vTorque"
    except OSError as error:
        problem = f"is missing on this node ({error.strerror})"
    if problem:
        problem = (
            f"the server's hook {hook.name} {problem}: only root on the server's host can change "
            "hooks. Use the same site config there and run: vtorque setup install --batch openpbs"
        )
    return Check(f"find the server's hook {hook.name} in {directory}", problem)


@dataclass(frozen=True)
class ServerHook:
    """Setup step that creates a hook in the OpenPBS server."""

    node: PbsNode
    name: str
    event: str
    content: bytes
    alarm: int
    order: int

    @property
    def text(self) -> str:
        """Description of the step."""
        return f"import the hook {self.name} for {self.event}, alarm {self.alarm} s"

    def is_applied(self) -> bool:
        """Return whether the hook exists with the right attributes and content."""
        found = self._list_hook()
        wanted = {"event": self.event, "enabled": "true", "alarm": str(self.alarm)}
        wanted |= {"order": str(self.order)}
        if any(found.get(key) != value for key, value in wanted.items()):
            return False
        return self._ask("export hook", "application/x-python default") == self.content.decode()

    def apply(self) -> None:
        """Create or correct the hook."""
        if not self._list_hook():
            self._run_qmgr(f"create hook {self.name}")
        self._run_qmgr(f"set hook {self.name} event = {self.event}")
        self._run_qmgr(f"set hook {self.name} alarm = {self.alarm}")
        self._run_qmgr(f"set hook {self.name} order = {self.order}")
        with tempfile.TemporaryDirectory() as directory:  # mode 0700
            file = Path(directory, "hook.py")
            file.write_bytes(self.content)
            self._run_qmgr(f"import hook {self.name} application/x-python default {file}")
        self._run_qmgr(f"set hook {self.name} enabled = true")

    def undo(self) -> None:
        """Delete the hook. Raise HostFault if other nodes accept VM jobs."""
        if self._list_hook():
            self.node.be_last()
            self._run_qmgr(f"delete hook {self.name}")

    def exists(self) -> bool:
        """Return whether the server has a hook of this name."""
        return bool(self._list_hook())

    def _list_hook(self) -> Mapping[str, str]:
        answer = self.node.commands.ask("qmgr", "-c", f"list hook {self.name}")
        if answer.code:
            if "hook not found" in answer.err:
                return {}
            raise HostFault(f"qmgr ended with exit code {answer.code}: {answer.words}")
        return dict(re.findall(r"^\s+(\w+) = (.*)$", answer.out, re.MULTILINE))

    def _run_qmgr(self, command: str) -> None:
        self.node.commands.run_checked("qmgr", "-c", command)

    def _ask(self, command: str, what: str) -> str:
        return self.node.commands.run_checked("qmgr", "-c", f"{command} {self.name} {what}")


def _resource(node: PbsNode, name: str) -> Change:
    """Return the step that creates the boolean resource, which marks nodes for VM jobs.

    Deletion affects all nodes at once (mgr_resource_delete), so undo is refused while another node
    has the resource. The server also refuses the deletion while a job requests the resource, even
    an ended job in the server's history.
    """
    commands = node.commands

    def done() -> bool:
        return commands.ask("qmgr", "-c", f"list resource {name}").code == 0

    def apply() -> None:
        commands.run_checked("qmgr", "-c", f"create resource {name} type=boolean, flag=h")

    def undo() -> None:
        if done():
            node.be_last()
            answer = commands.ask("qmgr", "-c", f"delete resource {name}")
            if "Resource busy on job" in answer.err:
                raise HostFault(
                    f"jobs request {name}, perhaps jobs in the server's history (qselect -x): "
                    "delete them (qdel -x), or wait for job_history_duration"
                )
            if answer.code:
                raise HostFault(f"qmgr ended with exit code {answer.code}: {answer.words}")

    return Change(
        f"create the resource {name}, which is true on nodes that run VM jobs", done, apply, undo
    )
