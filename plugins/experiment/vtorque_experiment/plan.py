"""The plan of an experiment: everything that determines what its jobs run.

Guests can write in the results directory, so a run keeps its plan in memory. ``vmgr experiment
resume`` reads the plan from the results directory, and submits jobs only if this host has the
plan's *seal* (a hash of the plan), or if the user accepts the plan. ``vmgr experiment run`` stores
the seal in a directory that guests do not see.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vtorque_core.api import HostFault, Refused, printable
from vtorque_experiment import files, matrix, wrapper
from vtorque_experiment.definition import Definition
from vtorque_experiment.matrix import Cell, MatrixPoint
from vtorque_experiment.place import ResultsDirectory

MAX_SCRIPT = 4 << 20  # bytes
SEALS = Path("/var/tmp")  # noqa: S108 - survives a reboot, is local to this host, and no guest sees it
_ID = re.compile(r"[0-9a-f]{6}", re.ASCII)


@dataclass(frozen=True)
class ExperimentPlan:
    """The plan of an experiment: the jobs to submit.

    Attributes:
        id: the part of the jobs' names that identifies the experiment.
        root: the directory of the experiment's file, EXPERIMENT_ROOT in scripts.
        seed: the seed of the random order of the points.
        repetitions: the number of runs of each combination.
        definition: the content of the experiment's file.
        scripts: the user's scripts, by their names in the experiment's file.
    """

    id: str
    root: str
    seed: int
    repetitions: int
    definition: Definition
    scripts: Mapping[str, bytes]

    @cached_property
    def cells(self) -> Sequence[Cell]:
        """The combinations of the experiment."""
        return matrix.cells(self.definition)

    @cached_property
    def points(self) -> Mapping[int, MatrixPoint]:
        """The points, by number."""
        ordered = matrix.order_points(len(self.cells), self.repetitions, self.seed)
        return {point.number: point for point in ordered}

    def copy_path(self, place: ResultsDirectory, script: str) -> Path:
        """Return the path of the copy of ``script`` in the results directory."""
        return place.scripts / copy_name(self.definition, script)

    def job_script(self, place: ResultsDirectory, number: int) -> bytes:
        """Return the job script of a point."""
        point = self.points[number]
        cell = self.cells[point.cell]
        name = str(cell.get("script", self.definition.scripts[0]))
        environment = {
            "EXPERIMENT_ROOT": self.root,
            "EXPERIMENT_POINT": str(number),
            "EXPERIMENT_REPETITION": str(point.repetition),
            **self.definition.env,
            **{axis[4:]: value for axis, value in cell.items() if axis.startswith("env.")},
        }
        return wrapper.script(
            self.scripts[name], self.copy_path(place, name), place.point(number), environment
        )

    @property
    def text(self) -> str:
        """All values that determine what a job runs and where, as JSON."""
        definition = self.definition
        sums = {name: hashlib.sha256(self.scripts[name]).hexdigest() for name in definition.scripts}
        values = {
            "id": self.id, "root": self.root, "seed": self.seed, "repetitions": self.repetitions,
            "scripts": sums, "vm": dict(definition.vm), "batch": definition.batch,
            "env": dict(definition.env), "matrix": dict(definition.matrix),
            "exclude": [dict(each) for each in definition.exclude],
        }  # fmt: skip
        return json.dumps(values, indent=2) + "\n"

    @property
    def seal(self) -> str:
        """The first 128 bits of the SHA-256 of :attr:`text`, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]


def copy_name(definition: Definition, script: str) -> str:
    """Return the file name of the copy of a job script."""
    return f"{definition.scripts.index(script)}-{Path(script).name}"


def read_plan(
    place: ResultsDirectory, definition: Definition, about: Mapping[str, str], points: int
) -> ExperimentPlan:
    """Read the plan from a directory of results, where a guest may have changed it.

    ``about`` is the result of :meth:`Book.notes`, ``points`` the number of points in the database.
    Raises Refused if the plan is damaged or incomplete.
    """
    try:
        scripts = {
            name: files.read(
                place.top, place.scripts.name, copy_name(definition, name), most=MAX_SCRIPT
            )
            for name in definition.scripts
        }
        repetitions = points // len(matrix.cells(definition))
        plan = ExperimentPlan(
            about["id"], about["root"], int(about["seed"]), repetitions, definition, scripts
        )
    except OSError as error:
        raise _damaged_plan(place, f"{error.filename or 'scripts'}: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise _damaged_plan(place, str(error)) from None
    if not _ID.fullmatch(plan.id):
        raise _damaged_plan(place, f"id {plan.id}")
    return plan


def keep_seal(plan: ExperimentPlan) -> None:
    """Store the seal of a plan (its hash) on this host. Raises HostFault."""
    try:
        (_seals_dir() / plan.seal).touch(mode=0o600)
    except OSError as error:
        raise _seal_error(error) from None


def has_seal(plan: ExperimentPlan) -> bool:
    """Return True if this user has stored the plan's seal on this host.

    The seal is the plan's hash: a stored seal shows that the plan was not changed since the user
    started or accepted it.
    """
    try:
        # A new date keeps systemd-tmpfiles from removing the seal.
        os.utime(_seals_dir() / plan.seal, follow_symlinks=False)
    except OSError:
        return False
    return True


def delete_seal_and_copy(plan: ExperimentPlan) -> None:
    """Delete a plan's seal (hash), and the copy of the plan that the user was asked to check."""
    (_seals_dir() / plan.seal).unlink(missing_ok=True)
    shutil.rmtree(_readable_copy(plan), ignore_errors=True)


def copy_plan_and_refuse(plan: ExperimentPlan, place: ResultsDirectory) -> Refused:
    """Copy a plan for the user to check; return the refusal that names the copy's directory.

    Call this function if the plan's seal (hash) is not on this host, because a guest may then have
    changed the plan. Guests do not see the directory. Raises HostFault.
    """
    directory = _readable_copy(plan)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / "plan.json").write_text(plan.text)
        for name, content in plan.scripts.items():
            (directory / copy_name(plan.definition, name)).write_bytes(content)
    except OSError as error:
        raise _seal_error(error) from None
    return Refused(
        f"{printable(str(place.top))}: its plan differs from the one that vmgr experiment run "
        "started on this host: either run was started on another host, or you or a job in a "
        f"guest changed the plan; check it in {directory}, then run vmgr experiment resume "
        f"--accept {plan.seal}"
    )


def _readable_copy(plan: ExperimentPlan) -> Path:
    return _seals_dir() / f"{plan.seal}.plan"


def _seal_error(error: OSError) -> HostFault:
    return HostFault(f"{SEALS}: {error.strerror}: cannot store the hash of the plan")


def _seals_dir() -> Path:
    """Return the directory of this user's seals (hashes of plans). Create it if it is missing.

    A new directory's name ends in random characters, so no other user can create it first. Raises
    OSError.
    """
    uid = os.geteuid()
    prefix = f"vtorque-experiment-{uid}"
    for place in sorted(SEALS.glob(f"{prefix}*")):
        with contextlib.suppress(FileNotFoundError):  # removed since glob()
            about = place.lstat()
            if about.st_uid == uid and about.st_mode == stat.S_IFDIR | 0o700:
                return place
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=SEALS))


def _damaged_plan(place: ResultsDirectory, why: str) -> Refused:
    return Refused(
        f"{printable(str(place.top))}: its plan is damaged ({printable(why, 200)}), so no more "
        "points can be submitted; start again with vmgr experiment run --dir DIR"
    )
