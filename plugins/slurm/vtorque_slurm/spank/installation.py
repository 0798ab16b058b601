"""Install the SPANK plugin (spank(8)) on a node, and check that Slurm loads the plugin.

If Slurm cannot load the plugin, Slurm ignores the error and runs a VM job's script on the host.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from pathlib import Path

from vtorque_admin.steps import MARK, Change, Check, ReplacedFile, edit_file
from vtorque_core.api import HostFault
from vtorque_core.api.health import HealthResult, failure, ok, warning
from vtorque_core.api.node_job import Site
from vtorque_core.api.setup_steps import Installation, SetupStep
from vtorque_core.live import service
from vtorque_slurm import slurm_conf
from vtorque_slurm.batch_commands import SlurmClient
from vtorque_slurm.settings import Settings
from vtorque_slurm.spank import build

NAME = "vtorque-spank.so"
_LINE = re.compile(rb"^optional[ \t]+\S*/vtorque-spank\.so(?:[ \t][^\n]*)?\n", re.MULTILINE)
_CREATED = b"# created by %s\n" % MARK
_MAX_DEPTH = 8
_MAX_SHOWN = 8  # nodes in one message


def steps(settings: Settings, place: Installation, proofs: Path) -> Iterator[SetupStep]:
    """Yield the steps that build the plugin and add it to plugstack.conf."""
    if not settings.spank:
        return
    plugin, problem = b"", ""
    try:
        plugin = build.build()
    except HostFault as error:
        problem = str(error)
    path = place.jobshell.with_name(NAME)
    yield Check("headers of Slurm for the SPANK plugin", problem)
    yield ReplacedFile(path, plugin)
    words = (path, f"jobshell={place.jobshell}", f"proofs={proofs}")
    line = " ".join(map(str, ("optional", *words, f"vsub={place.program.with_name('vsub')}")))
    yield _stack_line(plugstack(Path(settings.conf)), line)


def plugstack(conf: Path) -> Path:
    """Return the path of plugstack.conf, set by PlugStackConfig in slurm.conf(5)."""
    given = slurm_conf.value(conf, "PlugStackConfig")
    return Path(given) if given else conf.with_name("plugstack.conf")


def _stack_line(stack: Path, line: str) -> Change:
    ours = line.encode() + b"\n"

    def text() -> bytes:
        return stack.read_bytes() if stack.exists() else b""

    def apply() -> None:
        created = b"" if stack.exists() else _CREATED
        # Not appended: the last line may lack a newline.
        edit_file(stack, lambda now: created + ours + _LINE.sub(b"", now), may_be_missing=True)

    def undo() -> None:
        is_ours = _CREATED in text()
        if stack.exists():
            edit_file(
                stack,
                lambda now: _LINE.sub(b"", now).replace(_CREATED, b""),
                may_be_missing=is_ours,
            )

    return Change(f"add {NAME} to {stack}", lambda: ours in text(), apply, undo)


def problem(settings: Settings, client: SlurmClient) -> str:
    """Return why Slurm on this node does not load the plugin, or an empty string."""
    stack = plugstack(Path(settings.conf))
    path = next((p for p in _plugins(stack, _MAX_DEPTH) if p.name == NAME), None)
    if path is None:
        return f"{stack} does not load {NAME}"
    try:
        built_for = build.release(path.read_bytes())
    except OSError as error:
        return f"{path}: {error.strerror}"
    runs = client.run("slurmd", "-V").split()[-1]
    if built_for and runs.startswith(f"{built_for}."):
        return ""
    return f"{path} was built for Slurm {built_for or '?'}, and Slurm {runs} runs here"


def _plugins(stack: Path, depth: int) -> Iterator[Path]:
    try:
        text = stack.read_text("utf-8", "surrogateescape")
    except OSError:
        return
    for words in (line.split() for line in text.splitlines()):
        if words[:1] == ["include"] and len(words) > 1 and depth:
            for found in sorted(glob.glob(str(stack.parent / words[1]))):  # noqa: PTH207
                yield from _plugins(Path(found), depth - 1)
        elif words[:1] in (["optional"], ["required"]) and len(words) > 1:
            yield Path(words[1])


def check(site: Site) -> Iterator[HealthResult]:
    """Check that this node loads the plugin, and that no node without vTorque can get VM jobs.

    Without vTorque, a node would run the script of a VM job on bare metal.
    """
    settings = site[Settings]
    if not settings.spank or service.batch_system(site.path)[1].name != "slurm":
        return
    client = SlurmClient(settings)
    try:
        found, others = problem(settings, client), _unmarked_nodes(settings, client)
    except HostFault as error:
        found, others = str(error), ""
    if found:
        yield failure(
            f"{found}: jobs with --vm= are refused on this node",
            "run vtorque setup install --batch slurm again, after every upgrade of Slurm",
        )
    else:
        yield ok(f"Slurm loads {NAME}")
    if others:
        yield warning(
            f"{others}: without vTorque, a node runs the script of a --vm= job on the host, and no "
            "message says so",
            "use cli_filter.lua of vtorque-slurm, which requests the feature; or run vtorque setup "
            "install on all nodes, and set [plugin.slurm] feature and Feature= in slurm.conf",
        )


def _unmarked_nodes(settings: Settings, client: SlurmClient) -> str:
    """Return a message about nodes that lack vTorque but can get --vm= jobs, or an empty string."""
    conf = Path(settings.conf)
    script = conf.with_name("cli_filter.lua")
    filters = slurm_conf.value(conf, "CliFilterPlugins").split(",")
    if "lua" in filters and script.exists() and "vtorque" in script.read_text(errors="replace"):
        return ""
    if not settings.feature:
        return "[plugin.slurm] feature is not set, so --vm= jobs can start on any node"
    rows = client.run("sinfo", "-haN", "--format=%N|%b").splitlines()
    nodes = {
        name: set(features.split(",")) for name, _, features in (r.partition("|") for r in rows)
    }
    bare = sorted(name for name, features in nodes.items() if settings.feature not in features)
    shown = ", ".join(bare[:_MAX_SHOWN]) + ", ..." * (len(bare) > _MAX_SHOWN)
    return f"nodes without the feature {settings.feature}: {shown}" if bare else ""
