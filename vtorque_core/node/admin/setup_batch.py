"""The batch system's part of ``vtorque setup``: hooks, the job shell, its name in the config.

Runs as root. ``<state>/setup.json`` (0600) remembers whose steps were begun and what the config
was, so that an uninstall finds its way back after any interruption.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vtorque_core import safefs
from vtorque_core.api_batch import NodeAdapter
from vtorque_core.api_setup import (
    MARK,
    Check,
    Installation,
    ReplacedFile,
    SetupStep,
    make_directories,
)
from vtorque_core.config import MAX_BYTES, Site
from vtorque_core.errors import HostFault, VtorqueError
from vtorque_core.plugins import Plugins
from vtorque_core.toml_lines import line_of

Say = Callable[[str], None]

_SYSTEM = re.compile(
    r"""((?:^|[\s{,.])["']?system["']?[ \t]*=[ \t]*)(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
)
_HEADER = re.compile(r"[ \t]*\[[ \t]*batch[ \t]*\][ \t\r]*(?:#.*)?")


def adapter_of(site: Site, plugins: Plugins, batch: str) -> NodeAdapter:
    """Return the node part of a batch system. Raises ConfigError if no plugin brings it."""
    return plugins.batch_system(batch).node(site)


def steps_of(site: Site, plugins: Plugins, batch: str, config: Path) -> list[SetupStep]:
    """Return what makes a batch system call this installation of vTorque on this node, in order.

    None where it calls vTorque by itself. Raises HostFault, ConfigError.
    """
    program = Path(sys.prefix, "bin", "vtorque")
    end = site.node.teardown_timeout
    start = site.node.start_timeout + end
    python = program.with_name("python3")
    place = Installation(program, config.absolute(), site.paths.jobshell, start, end, python)
    own = adapter_of(site, plugins, batch).setup_steps(place)
    if not own:
        return []
    if not program.exists():
        raise HostFault(
            f"{program} does not exist: install vTorque into a virtual environment, such as "
            "/opt/vtorque"
        )
    return [ReplacedFile(place.jobshell, jobshell_script(place.config)), *own]


def jobshell_script(config: Path) -> bytes:
    """Return the program that the batch system starts, as the user, instead of the job's shell.

    Isolated mode (python(1), -I), so that no PYTHON* variable and no file of the user's changes
    what runs; a script's sh reads neither ENV nor BASH_ENV (POSIX sh, 2.5.3; bash(1), INVOCATION).
    The environment itself is the job's, and goes on unchanged.
    """
    python = [str(Path(sys.prefix, "bin", "python3")), "-I", "-m", "vtorque_core.cli.vtorque"]
    argv = [*python, "jobshell", "--config", str(config)]
    return f'#!/bin/sh\n# Written by {MARK.decode()}.\nexec {shlex.join(argv)} "$@"\n'.encode()


def install(
    site: Site, plugins: Plugins, config: Path, batch: str, say: Say, *, dry_run: bool = False
) -> None:
    """Apply each step that does not hold yet, then make ``batch`` the site's in the config.

    Raises HostFault saying what to do; what was done before stays, and the next run goes on.
    """
    steps = steps_of(site, plugins, batch, config)
    memory = site.paths.state / "setup.json"
    if steps and not dry_run:
        record = _load(memory)
        record["batch"] = [*(b for b in record["batch"] if b != batch), batch]
        _save(memory, record)
    for number, step in enumerate(steps):
        try:
            if step.done():
                continue
            say(f"would {step.text}" if dry_run else step.text)
            if not dry_run:
                step.apply()
            elif isinstance(step, Check):
                say(f"  by hand: {step.problem}")
        except (VtorqueError, OSError) as error:
            later = [each for each in steps[number + 1 :] if isinstance(each, Check)]
            also = "".join(f". Also: {each.problem}" for each in later if not each.done())
            raise HostFault(
                f"{error}{also}. What was done before stays: when this is mended, run "
                f"vtorque setup install --batch {batch} again"
            ) from None
    if not _is_system(config, batch):
        text = f'set [batch] system = "{batch}" in {config}'
        say(f"would {text}" if dry_run else text)
        if not dry_run:
            _edit_config(config, batch, memory)


def uninstall(site: Site, plugins: Plugins, config: Path, say: Say) -> None:
    """Take the steps back, last first, and restore what was there before, edits kept.

    Raises HostFault at the end if a step could not be taken back; the others are.
    """
    memory = site.paths.state / "setup.json"
    record = _load(memory)
    if told := _restore_config(config, record):
        say(told)
    troubles = 0
    for batch in reversed(record["batch"] or [site.batch.system]):
        try:
            steps = steps_of(site, plugins, batch, config)
        except VtorqueError as error:
            say(f"{batch}: {error}")
            troubles += 1
            continue
        troubles += sum(not _undo(step, say) for step in reversed(steps))
    if troubles:
        raise HostFault(f"{troubles} steps are not taken back, see above; then run this again")
    memory.unlink(missing_ok=True)


def _undo(step: SetupStep, say: Say) -> bool:
    if isinstance(step, Check):
        return True
    try:
        if step.done():
            say(f"undo: {step.text}")
        step.undo()
    except (VtorqueError, OSError) as error:
        say(str(error))
        return False
    return True


def state(site: Site, plugins: Plugins, batch: str) -> Iterator[tuple[str, bool, str]]:
    """Yield each step's text, whether it holds, and what to do by hand. For ``doctor``."""
    for step in steps_of(site, plugins, batch, site.path):
        try:
            yield step.text, step.done(), step.problem if isinstance(step, Check) else ""
        except (VtorqueError, OSError) as error:
            yield type(step).__name__, False, str(error)


# -- the config -----------------------------------------------------------------------------------


def with_system(text: str, batch: str) -> str:
    """Return a TOML text whose ``[batch] system`` is ``batch``, all else as it was.

    Raises HostFault if that line cannot be found; then the admin has to write it.
    """
    value = json.dumps(batch)
    lines = text.split("\n")
    try:
        wanted = tomllib.loads(text)
        table = wanted.setdefault("batch", {})
        line = line_of(text, "batch.system")
        if line is not None and "system" in table:
            lines[line - 1] = _SYSTEM.sub(lambda m: m[1] + value, lines[line - 1], count=1)
        elif line is not None and _HEADER.fullmatch(lines[line - 1]):
            lines.insert(line, f"system = {value}")
        else:
            lines += ["[batch]", f"system = {value}", ""]
        new = "\n".join(lines)
        table["system"] = batch
        if tomllib.loads(new) == wanted:
            return new
    except ValueError:
        pass
    raise HostFault(f"[batch] is written in a way that cannot be edited: write system = {value}")


def _is_system(config: Path, batch: str) -> bool:
    text = _read(config)
    found = None if text is None else tomllib.loads(text).get("batch", {}).get("system", "local")
    return found == batch


def _read(config: Path) -> str | None:
    try:
        with config.open("rb") as file:
            return file.read(MAX_BYTES).decode()
    except FileNotFoundError:
        return None


def _write(config: Path, text: str) -> None:
    """Replace the content; owner and mode stay, and a link stays one."""
    real = config.resolve()
    try:
        if real.exists():
            status = real.stat()
            mode, uid, gid = status.st_mode & 0o7777, status.st_uid, status.st_gid
        else:
            make_directories(real.parent)
            mode, uid, gid = 0o644, -1, -1
        safefs.replace(str(real), text.encode(), mode=mode, uid=uid, gid=gid)
    except OSError as error:
        raise HostFault(f"{config}: {error.strerror}") from None


def _edit_config(config: Path, batch: str, memory: Path) -> None:
    before = _read(config)
    text = "# vTorque site config. All keys with their defaults: vtorque config example\n"
    new = with_system(text if before is None else before, batch)
    record = _load(memory)
    known = record["config"]
    if known is None:
        old = tomllib.loads(before or "").get("batch", {}).get("system", "local")
        record["config"] = {"before": before, "system": old, "after": _sum(new)}
    else:
        if before is not None and _sum(before) != known["after"] and before != known["before"]:
            known["before"] = with_system(before, known["system"])  # edited since: that stays
        known["after"] = _sum(new)
    _save(memory, record)
    _write(config, new)


def _restore_config(config: Path, record: dict[str, Any]) -> str:
    """Undo :func:`_edit_config`; return what was done, or nothing."""
    known, now = record["config"], _read(config)
    if known is None or now is None or now == known["before"]:
        return ""
    if _sum(now) != known["after"]:
        if _is_system(config, known["system"]):
            return ""
        _write(config, with_system(now, known["system"]))
        return f"{config} was edited since: only [batch] system is set back to {known['system']}"
    if known["before"] is None:
        config.unlink()
        return f"removed {config}"
    _write(config, known["before"])
    return f"restored {config}"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _load(memory: Path) -> dict[str, Any]:
    record: dict[str, Any] = {"batch": [], "config": None}
    if memory.exists():
        record.update(json.loads(memory.read_text(encoding="utf-8")))
    return record


def _save(memory: Path, record: dict[str, Any]) -> None:
    safefs.replace(str(memory), json.dumps(record).encode(), mode=0o600)
