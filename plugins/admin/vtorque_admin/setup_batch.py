"""Install the batch system's hooks and the job shell, and apply plugins' setup steps. As root.

For uninstallation, ``<state>/setup.json`` (0600) records the batch systems and the old site config.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtorque_admin import edit_config
from vtorque_admin.steps import Check, ReplacedFile, hook_script
from vtorque_core.api import HostFault, VtorqueError, hooks, replace_file
from vtorque_core.api.setup_steps import Installation, SetupStep
from vtorque_core.live.service import installation
from vtorque_core.live.site_config import Plugins, Site

Say = Callable[[str], None]


def steps_of(site: Site, plugins: Plugins, batch: str, config: Path) -> list[SetupStep]:
    """Return the setup steps of the batch system ``batch``; empty if it needs none."""
    place = installation(site, config)
    own = plugins.batch_system(batch).node(site).setup_steps(place)
    if not own:
        return []
    if not place.program.exists():
        raise HostFault(
            f"{place.program} does not exist: install vTorque into a virtual environment, such as "
            "/opt/vtorque"
        )
    return [ReplacedFile(place.jobshell, jobshell_script(place)), *own]


def _plugin_steps(site: Site, plugins: Plugins, config: Path) -> list[SetupStep]:
    place = installation(site, config)
    return [c.item for c in plugins.collect(hooks.vtorque_setup_steps, site=site, place=place)]


def jobshell_script(place: Installation) -> bytes:
    """Return the program that the batch system starts as the user, instead of the user's shell.

    The program is an sh script. For scripts, sh ignores the user's ENV and BASH_ENV (POSIX sh,
    2.5.3; bash(1), INVOCATION). The script runs ``python -I``, which ignores PYTHON* variables
    and the user's site-packages.
    """
    return hook_script(f'exec {shlex.join(place.call("jobshell"))} "$@"')


def install(
    site: Site, plugins: Plugins, config: Path, batch: str, say: Say, *, dry_run: bool = False
) -> None:
    """Apply all setup steps that are not applied yet, and write ``batch`` to the site config.

    Raises HostFault before any change if the admin must do a step by hand. After a failure, call
    this function again.
    """
    steps = [*steps_of(site, plugins, batch, config), *_plugin_steps(site, plugins, config)]
    fix = f"after fixing this, run vtorque setup install --batch {batch} again"
    problems = [step.problem for step in steps if isinstance(step, Check) and not step.is_applied()]
    if problems and not dry_run:
        raise HostFault(f"{'. Also: '.join(problems)}. {batch} was not changed: {fix}")
    memory = site.paths.state / "setup.json"
    if steps and not dry_run:
        record = _load(memory)
        record["batch"] = [*(b for b in record["batch"] if b != batch), batch]
        _save(memory, record)
    for step in steps:
        try:
            if step.is_applied():
                continue
            say(f"would {step.text}" if dry_run else step.text)
            if not dry_run:
                step.apply()
            elif isinstance(step, Check):
                say(f"  by hand: {step.problem}")
        except (VtorqueError, OSError) as error:
            raise HostFault(f"{error}. The earlier steps remain in effect: {fix}") from None
    if not _is_system(config, batch):
        text = f'set [batch] system = "{batch}" in {config}'
        say(f"would {text}" if dry_run else text)
        if not dry_run:
            _edit_config(config, batch, memory)


def uninstall(site: Site, plugins: Plugins, config: Path, say: Say) -> None:
    """Restore the site config, and undo the setup steps. Files that the admin has edited stay."""
    memory = site.paths.state / "setup.json"
    record = _load(memory)
    if told := _restore_config(config, record):
        say(told)
    troubles = 0
    for each in plugins.each(
        hooks.vtorque_setup_steps, site=site, place=installation(site, config)
    ):
        if each.error is not None:
            say(f"{each.plugin}: {each.error}")
        troubles += each.error is not None or not _undo(each.item, say)
    for batch in reversed(record["batch"] or [site.batch.system]):
        try:
            steps = steps_of(site, plugins, batch, config)
        except VtorqueError as error:
            say(f"{batch}: {error}")
            troubles += 1
            continue
        troubles += sum(not _undo(step, say) for step in reversed(steps))
    if troubles:
        raise HostFault(
            f"{troubles} steps could not be undone (see above): fix the causes and retry"
        )
    memory.unlink(missing_ok=True)


def _undo(step: SetupStep, say: Say) -> bool:
    if isinstance(step, Check):
        return True
    try:
        if step.is_applied():
            say(f"undo: {step.text}")
        step.undo()
    except (VtorqueError, OSError) as error:
        say(str(error))
        return False
    return True


# -- the config -----------------------------------------------------------------------------------


def _is_system(config: Path, batch: str) -> bool:
    return config.exists() and _system(edit_config.read(config)) == batch


def _system(text: str) -> str:
    return str(tomllib.loads(text).get("batch", {}).get("system", "local"))


def _edit_config(config: Path, batch: str, memory: Path) -> None:
    record = _load(memory)
    new = edit_config.set_value(edit_config.read(config), "batch", "system", batch)
    record["config"] = {"before": _remove_edits(config, record["config"]), "after": _sum(new)}
    _save(memory, record)
    edit_config.write(config, new)


def _restore_config(config: Path, record: dict[str, Any]) -> str:
    known = record["config"]
    if known is None or not config.exists():
        return ""
    back = _remove_edits(config, known)
    if back is None:
        config.unlink()
        return f"removed {config}"
    if back == edit_config.read(config):
        return ""
    edit_config.write(config, back)
    if back == known["before"]:
        return f"restored {config}"
    return f"{config} was edited: only [batch] system is restored to {_system(back)}"


def _remove_edits(config: Path, known: dict[str, Any] | None) -> str | None:
    """Return the config without the installation's change; None if no config existed before."""
    now = edit_config.read(config) if config.exists() else None
    if known is None or now in (None, known["before"]):
        return now
    if _sum(now) == known["after"]:
        return str(known["before"]) if known["before"] is not None else None
    system = _system(known["before"] or "")
    return now if _system(now) == system else edit_config.set_value(now, "batch", "system", system)


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _load(memory: Path) -> dict[str, Any]:
    record: dict[str, Any] = {"batch": [], "config": None}
    if memory.exists():
        record.update(json.loads(memory.read_text(encoding="utf-8")))
    return record


def _save(memory: Path, record: dict[str, Any]) -> None:
    replace_file(str(memory), json.dumps(record).encode(), mode=0o600)
