"""Install Prolog and Epilog for ``vtorque setup install --batch slurm``.

If Prolog (or Epilog) in slurm.conf is a glob, setup adds vTorque's hook to the glob's directory.
Otherwise setup creates a directory with the hook and a link to the site's program, and sets Prolog
to a glob of this directory. Slurm runs the programs of a glob in reverse alphabetical order
(slurm.conf(5)).
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vtorque_admin.steps import MARK, Change, Check, Mark, ReplacedFile, check_timeout
from vtorque_core.api import name_errors
from vtorque_core.api.setup_steps import Installation, SetupStep, make_directories
from vtorque_slurm import controller_updates, hooks, slurm_conf
from vtorque_slurm.batch_commands import SlurmClient
from vtorque_slurm.conf_line import conf_line
from vtorque_slurm.settings import Settings
from vtorque_slurm.spank import installation

OURS = "50-vtorque"
_SITES = {"Prolog": "90-site", "Epilog": "10-site"}  # first in Prolog, last in Epilog
_UNLIMITED = 65534  # default of PrologEpilogTimeout, slurm.conf(5)


def steps(settings: Settings, place: Installation, journal: Path, proofs: Path) -> list[SetupStep]:
    """Return the setup steps for this node, in order."""
    path = Path(settings.conf)
    texts = {"Prolog": hooks.prolog(place), "Epilog": hooks.epilog(place, journal, proofs)}
    found: list[SetupStep] = []
    for key, content in texts.items():
        found += _hook(path, key, content)
    found += installation.steps(settings, place, proofs)
    limit = settings.prolog_time
    found.append(check_timeout("[plugin.slurm] prolog_time", limit, place.start_time, "a start"))
    found += _checks(settings, path)
    if settings.feature:
        found.append(feature_step(settings.feature, SlurmClient(settings)))
    return found


def _hook(path: Path, key: str, content: bytes) -> Iterator[SetupStep]:
    own = path.parent / "vtorque" / f"{key.lower()}.d"
    now = slurm_conf.value(path, key)
    if re.search(r"[*?\[]", now) and not now.startswith(f"{own}/"):
        directory, pattern = Path(now).parent, Path(now).name
        name = _find_name(directory, pattern)
        if name is None or "*" in str(directory):
            problem = (
                f"{key}={now} does not match vTorque's file names: the pattern must end with /*"
            )
            yield Check(f"{key} of {path}", problem)
        else:
            yield ReplacedFile(directory / name, content)
        return
    yield _folder(own.parent)
    yield _folder(own)
    yield ReplacedFile(own / OURS, content)
    if now and not now.startswith(f"{own}/"):
        yield _link(own / _SITES[key], Path(now))
    elif now and os.path.lexists(own / _SITES[key]):
        yield _link(own / _SITES[key], (own / _SITES[key]).readlink())
    yield conf_line(path, key, f"{own}/*")


def _find_name(directory: Path, pattern: str) -> str | None:
    """Return the name of vTorque's file in the directory, or an unused name that fits the pattern.

    Setup never renames the site's files, because Slurm runs only files that fit the site's pattern.
    """
    names = (f"{n}-vtorque{end}" for n in range(50, 60) for end in ("", ".sh"))
    fitting = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    with contextlib.suppress(OSError):
        there = {each.name: each for each in directory.iterdir()}
        files = [n for n in fitting if n in there and there[n].is_file()]
        ours = [n for n in files if MARK in there[n].read_bytes()]
        fitting = ours or [n for n in fitting if n not in there]
    return fitting[0] if fitting else None


def _folder(path: Path) -> Change:
    def make() -> None:
        with name_errors(path):
            path.mkdir(mode=0o755, exist_ok=True)
            path.chmod(0o755)

    def remove() -> None:
        with contextlib.suppress(OSError):
            path.rmdir()

    return Change(f"create {path}", path.is_dir, make, remove)


def _link(path: Path, target: Path) -> Change:
    def done() -> bool:
        return path.is_symlink() and path.readlink() == target

    def make() -> None:
        with name_errors(path):
            make_directories(path.parent)
            new = path.with_name(f".{path.name}.new")
            new.unlink(missing_ok=True)
            new.symlink_to(target)
            new.replace(path)

    def remove() -> None:
        if path.is_symlink():
            path.unlink()

    return Change(f"link {path} to the site's {target}", done, make, remove)


def feature_step(name: str, client: SlurmClient) -> Mark:
    """Return the step that adds the site's feature to this node.

    Slurm drops the feature when it rereads slurm.conf, unless the node's ``Feature=`` lists it. The
    step also counts as done if ``vtorque doctor`` has removed the feature.
    """
    return Mark(
        f"set the feature {name} on this node (to make it permanent: NodeName=... Feature={name})",
        lambda: controller_updates.is_marked(client, name),
        lambda: controller_updates.mark(client, name, healthy=True, reason=""),
        lambda: controller_updates.mark(client, name, healthy=False, reason=""),
    )


def _checks(settings: Settings, path: Path) -> Sequence[Check]:
    flags = {flag.strip().lower() for flag in slurm_conf.value(path, "PrologFlags").split(",")}
    least = round(settings.prolog_time)
    alloc = {"alloc", "contain", "x11"} & flags  # the others imply alloc, slurm.conf(5)
    return (
        Check(
            "PrologFlags=Alloc",
            ""
            if alloc
            else (
                f"{path}: without PrologFlags=Alloc, guests would start only with the first step "
                "on a node, and not on all nodes: set it, then run scontrol reconfigure"
            ),
        ),
        _check_minimum(path, "BatchStartTimeout", least, 10),
        _check_minimum(path, "PrologEpilogTimeout", least, _UNLIMITED),
    )


def _check_minimum(path: Path, key: str, least: int, default: int) -> Check:
    text = slurm_conf.value(path, key)
    now = int(text) if re.fullmatch(r"\d{1,6}", text, re.ASCII) else default
    problem = (
        f"{path}: {key}={now} (s) is too short, because guests may need {least} s: set "
        f"{key}={least}"
    )
    return Check(f"{key} of at least {least} s", "" if now >= least else problem)
