"""Setup steps and checks for a Torque node. Privileges: root."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from vtorque_admin.steps import KEPT, MARK, Change, Check, ReplacedFile, check_timeout, edit_file
from vtorque_core.api import HostFault
from vtorque_core.api.node_job import Site
from vtorque_core.api.setup_steps import Installation, SetupStep
from vtorque_pbs.node import PbsNode
from vtorque_pbs.settings import Settings
from vtorque_pbs.setup import mark_step, rights
from vtorque_pbs.torque import hooks, submit_filter
from vtorque_pbs.torque.node import FIRST, SISTER

_ALARM = re.compile(rb"^[ \t]*\$prologalarm[ \t]+([0-9]+)[ \t]*\r?$", re.MULTILINE)
_MARGIN = 70.0  # 60 s for the site's own epilogue; pbs_mom kills a script 10 s before the alarm
_OFF = b"#vtorque# "
_OURS = b"# Written by " + MARK + b"; with the next line"


def steps(
    node: PbsNode, site: Site, settings: Settings, place: Installation
) -> Sequence[SetupStep]:
    """Return the steps in order. The last step makes the node accept VM jobs."""
    priv = node.home / "mom_priv"
    journal, proof = site.paths.journal, site.paths.run / "proof"
    names = ("prologue", "prologue.parallel", "epilogue", "epilogue.parallel")
    found: list[SetupStep] = [_is_node(priv), *(_check_trust(priv / name) for name in names)]
    for name, kind in (("prologue", FIRST), ("prologue.parallel", SISTER)):
        path = priv / name
        found.append(ReplacedFile(path, hooks.prologue(place, path, kind, proof)))
    for name in ("epilogue", "epilogue.parallel"):
        path = priv / name
        found.append(ReplacedFile(path, hooks.epilogue(place, path, journal, proof)))
    why = "a release, the site's own epilogue and the 10 s that pbs_mom subtracts"
    limit, least = settings.prologue_alarm, place.end_time + _MARGIN
    found.append(check_timeout("[plugin.pbs] prologue_alarm", limit, least, why))
    found += [_prolog_alarm(priv, math.ceil(limit)), rights(node.commands)]
    if settings.submit_filter:
        found += submit_filter.steps(node.home, place, settings.bindir)
    return [*found, mark_step(node, settings.property)] if settings.property else found


def _is_node(priv: Path) -> Check:
    problem = "" if priv.is_dir() else (
        f"{priv} does not exist. Is this a Torque node? If PBS_HOME is elsewhere, set "
        "[plugin.pbs] home"
    )  # fmt: skip
    return Check(f"find {priv}", problem)


def _check_trust(path: Path) -> Check:
    """Check that only root can change the site's script, because vTorque's hook runs it as root."""
    problem = ""
    for each in (path, path.with_name(path.name + KEPT)):
        with contextlib.suppress(FileNotFoundError):
            status = each.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid or status.st_mode & 0o022:
                problem = (
                    f"{each} is not a file that only root can change, so Torque does not run it"
                )
    return Check(f"look at {path}", problem)


def _prolog_alarm(priv: Path, seconds: int) -> Change:
    config = priv / "config"

    def done() -> bool:
        try:
            found = _ALARM.findall(config.read_bytes())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise HostFault(f"{config}: {error.strerror}") from None
        return bool(found) and int(found[-1]) >= seconds

    def change(edit: Callable[[bytes], bytes]) -> None:
        if edit_file(config, edit, may_be_missing=True):
            _reload_mom(priv)

    return Change(
        f"set $prologalarm to {seconds} (s) in {config}",
        done,
        lambda: change(lambda text: _add_alarm(_remove_alarm(text), seconds)),
        lambda: change(_remove_alarm),
    )


def _add_alarm(text: bytes, seconds: int) -> bytes:
    text = _ALARM.sub(lambda match: _OFF + match[0], text)
    end = b"\n"
    if text and not text.endswith(b"\n"):
        text, end = text + b"\n", b" and its newline before\n"
    return text + _OURS + end + b"$prologalarm %d\n" % seconds


def _remove_alarm(text: bytes) -> bytes:
    found = re.search(
        rb"^" + re.escape(_OURS) + rb"( and its newline before)?\n\$prologalarm [0-9]+\n",
        text,
        re.MULTILINE,
    )
    if found is None:
        return text
    before = text[: found.start()]
    if found[1] and before.endswith(b"\n"):
        before = before[:-1]
    return re.sub(rb"^" + _OFF, b"", before + text[found.end() :], flags=re.MULTILINE)


def _reload_mom(priv: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        pid = int((priv / "mom.lock").read_text())
        if Path("/proc", str(pid), "comm").read_text().strip() == "pbs_mom":
            os.kill(pid, signal.SIGHUP)
