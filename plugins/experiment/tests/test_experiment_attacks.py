"""Attacks on an experiment: a guest that writes in the results cannot run code on the host."""

import contextlib
import io
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import batch_double
import experiments
from patience import eventually
from vtorque_core.api import HostFault, Refused
from vtorque_core.live import service
from vtorque_experiment import (
    batch,
    definition,
    end_collector,
    files,
    page,
    plan,
    results,
    take,
    versions,
    wrapper,
)
from vtorque_experiment.batch import BatchCommands
from vtorque_experiment.book import DONE, FAILED, Book
from vtorque_experiment.command import experiment
from vtorque_experiment.definition import NumberSource
from vtorque_experiment.place import validate_place

TWO = 'script = "job.sh"\nrepetitions = 2\nlimits.jobs = 1\n'
EVIL = "#!/bin/sh\n#VSUB -vm none\n#PBS -vm none\necho evil >>{top}/evil\n"


@pytest.fixture(autouse=True)
def seals(tmp_path, monkeypatch):
    """Keep seals in the test's directory."""
    monkeypatch.setattr(plan, "SEALS", tmp_path)


def submissions(top):
    return [line.split() for line in (top / "batch" / "submissions").read_text().splitlines()]


def await_jobs(top):
    """Wait until no job runs, because jobs write in the directory that the test removes."""
    eventually(lambda: not list((top / "batch" / "jobs").iterdir()))


def batch_with_race(top, number, act):
    """Return a batch system whose vsub runs ``act`` for a point before it reads the script."""
    place, double = validate_place(top / "results"), experiments.double(top)
    hook = top / "vsub.py"
    hook.write_text(
        "import runpy, sys\nfrom pathlib import Path\n"
        f"point = Path({str(place.point(number))!r})\n"
        f"if sys.argv[-1] and any(word.endswith('-{number}') for word in sys.argv):\n"
        + "".join(f"    {line}\n" for line in act.splitlines())
        + f"sys.argv[0] = {batch_double.__file__!r}\n"
        f"runpy.run_path({batch_double.__file__!r}, run_name='__main__')\n"
    )
    return BatchCommands(
        (sys.executable, str(hook), str(top / "batch")), double.jobs, double.interval
    )


@pytest.mark.parametrize(
    "act",
    [
        "(point / 'job.sh').write_text({evil!r})",
        "(point / 'job.sh').unlink(missing_ok=True); (point / 'job.sh').symlink_to({file!r})",
        "(point / 'vsub.out').write_text('1.forged')",
    ],
)
def test_job_script_changed_before_vsub_reads_it_is_not_submitted(tmp_path, act):
    experiments.made(tmp_path, TWO)
    evil = EVIL.format(top=tmp_path)
    (tmp_path / "evil.sh").write_text(evil)
    double = batch_with_race(tmp_path, 2, act.format(evil=evil, file=str(tmp_path / "evil.sh")))
    assert experiments.run(tmp_path, batch=double).finished
    await_jobs(tmp_path)
    assert not (tmp_path / "evil").exists()
    assert {row.state for row in experiments.rows(tmp_path)} == {DONE}
    assert all(row.job.endswith(".double") for row in experiments.rows(tmp_path))
    for argv in submissions(tmp_path):
        assert "job.sh" not in " ".join(argv)


@pytest.mark.parametrize("bare", [True, False])
def test_script_copy_changed_after_the_start_is_not_executed(tmp_path, bare):
    text = f'script = "job.sh"\nmatrix.bare = [{str(bare).lower()}]\nrepetitions = 2\n'
    script = f"#!/bin/sh\necho mine >>{tmp_path}/mine\n"
    place = experiments.made(tmp_path, text + "limits.jobs = 1\n", script)
    copy = place.scripts / "0-job.sh"
    evil = EVIL.format(top=tmp_path)
    double = batch_with_race(tmp_path, 2, f"Path({str(copy)!r}).write_text({evil!r})")
    assert experiments.run(tmp_path, batch=double).finished
    await_jobs(tmp_path)
    assert not (tmp_path / "evil").exists()
    assert (tmp_path / "mine").read_text() == "mine\n"
    last = experiments.rows(tmp_path)[1]
    assert last.state == FAILED and "this script was changed" in last.reason


def test_vm_option_of_a_guest_point_overrides_its_script(tmp_path):
    place = experiments.made(
        tmp_path, 'script = "job.sh"\nmatrix.bare = [true, false]\n',
        "#!/bin/sh\n#VSUB -vm none\nexit 0\n",
    )  # fmt: skip
    assert experiments.run(tmp_path).finished
    await_jobs(tmp_path)
    cells = Book(place.database)
    bare = {row.number: cells.cells()[row.cell]["bare"] for row in cells.rows()}
    cells.close()
    for argv in submissions(tmp_path):
        number = int(argv[argv.index("-N") + 1].rpartition("-")[2])
        assert argv[argv.index("-vm") + 1] == ("none" if bare[number] else "keep=false")
        assert argv.count("-vm") == 1


@pytest.mark.parametrize("line", ["#VSUB -vm none", "#PBS -vm none"])
@pytest.mark.parametrize(
    ("system", "command"),
    [("local", ""), ("torque", ""), ("openpbs", ""), ("slurm", "sbatch"), ("slurm", "qsub")],
)
def test_vsub_reads_the_vm_option_of_a_point_with_a_script_on_stdin(
    tmp_path, monkeypatch, system, command, line
):
    config = tmp_path / "vtorque.toml"
    settings = f'[plugin.slurm]\ncommand = "{command}"\n' if command else ""
    config.write_text(f'[batch]\nsystem = "{system}"\n{settings}')
    site, plugin = service.batch_system(config)
    submitter = plugin.submitter(site)
    found = definition.parse_definition({"script": "job.sh"}, "e.toml")
    argv = batch.arguments((submitter.naming, "x"), found, {}, tmp_path)
    script = f"#!/bin/sh\n{line}\nexit 0\n".encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(script)))
    assert submitter.split(argv).vm == ("keep=false",)  # wins over directives: test_request.py


@pytest.mark.parametrize("text", ['batch = ["-vm", "none"]', 'matrix.batch.x = ["-q a -vm none"]'])
def test_vm_among_the_options_of_the_batch_system_is_refused(tmp_path, text):
    file = experiments.write(tmp_path, f'script = "job.sh"\n{text}\n')
    with pytest.raises(Refused, match="-vm is not an option of the batch system"):
        definition.read(file)


def test_forged_end_is_ignored_while_the_batch_system_lists_the_job(tmp_path):
    script = (
        "#!/bin/sh\n"
        'if [ "$EXPERIMENT_POINT" = 1 ]; then\n'
        "    echo '0 1 2' >ended\n"
        f"    while [ ! -e {tmp_path}/go ]; do sleep 0.05; done\n"
        "fi\n"
    )
    experiments.made(tmp_path, TWO, script)
    stop = threading.Event()
    runner = threading.Thread(target=experiments.run, args=(tmp_path,), kwargs={"stop": stop})
    runner.start()
    try:
        forged = validate_place(tmp_path / "results").point(1) / "ended"
        eventually(forged.exists)
        questions = tmp_path / "batch" / "questions"
        eventually(questions.exists)
        asked = questions.stat().st_size
        eventually(lambda: questions.stat().st_size > asked + 2)
        assert len(submissions(tmp_path)) == 1
        (tmp_path / "go").touch()
        eventually(lambda: len(submissions(tmp_path)) == 2)
    finally:
        (tmp_path / "go").touch()
        runner.join()
    await_jobs(tmp_path)


def test_claim_that_names_an_option_is_ignored(tmp_path):
    place = experiments.made(tmp_path, 'script = "job.sh"\n')
    there = Book(place.database)
    there.begin(1)
    there.close()
    place.point(1).mkdir(parents=True)
    (place.point(1) / "claim").symlink_to("--config=/home/ada/evil.toml")
    assert experiments.run(tmp_path).finished
    (row,) = experiments.rows(tmp_path)
    assert not row.job.startswith("-")
    assert end_collector.reporter(tmp_path)("--config=/x", place.point(1)) == "the point has no job"
    await_jobs(tmp_path)


def plant_links(place, target):
    """Create links to ``target`` with the names of all files that the host writes."""
    point = place.point(1)
    point.mkdir(parents=True)
    for name in (batch.JOB, batch.VSUB_OUT, batch.VSUB_ERR, take.REPORT):
        (point / name).symlink_to(target)
    for name in ("machine", "metrics", "begun", "stdout", "stderr", "ended.new"):
        (point / name).symlink_to(target)
    place.versions.unlink()
    place.versions.symlink_to(target)


def test_run_does_not_follow_links_when_it_writes(tmp_path):
    place = experiments.made(tmp_path, 'script = "job.sh"\n')
    target = tmp_path / "precious"
    target.write_text("mine\n")
    plant_links(place, target)
    assert experiments.run(tmp_path).finished
    await_jobs(tmp_path)
    place.write(place.versions, b"{}")
    assert target.read_text() == "mine\n"
    assert experiments.rows(tmp_path)[0].state == DONE


def test_points_directory_that_is_a_link_is_not_entered(tmp_path):
    place = experiments.made(tmp_path, 'script = "job.sh"\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (place.top / "points").symlink_to(elsewhere)
    with pytest.raises(HostFault, match="nothing is lost"):
        experiments.run(tmp_path)
    assert list(elsewhere.iterdir()) == []


def test_job_with_a_linked_directory_changes_nothing_outside(tmp_path):
    point = tmp_path / "results" / "points" / "000" / "000001"
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "000001").mkdir(parents=True)
    (elsewhere / "000001" / "stdout").write_text("mine\n")
    point.parent.parent.mkdir(parents=True)
    point.parent.symlink_to(elsewhere)
    runs = tmp_path / "job.sh"
    runs.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    script = wrapper.script(runs.read_bytes(), runs, point, {})
    done = subprocess.run(["/bin/sh"], input=script, capture_output=True, check=False)
    assert done.returncode == 1 and b"is a symbolic link" in done.stderr
    assert [path.name for path in (elsewhere / "000001").iterdir()] == ["stdout"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{", '{"host": 1}'])
def test_damaged_versions_file_is_ignored(tmp_path, text):
    place = experiments.made(tmp_path, 'script = "job.sh"\n')
    place.versions.write_text(text)
    assert isinstance(versions.read(place.versions), dict)
    assert page.results_page(results.read(place.top))


def test_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "run.lock").symlink_to(tmp_path / "made")
    with pytest.raises(HostFault), batch.hold_lock(tmp_path / "run.lock", wait=False):
        pass
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["link", "sub/stdout"])
def test_output_behind_a_link_is_not_read(tmp_path, name):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "stdout").write_text("rate 5\n")
    point = tmp_path / "points" / "000" / "000001"
    point.mkdir(parents=True)
    (point / "link").symlink_to(secret / "stdout")
    (point / "sub").symlink_to(secret)
    with pytest.raises(take.MissingNumber):
        take.number(NumberSource("x", pattern="rate (.*)", file=name), point)


def test_resume_refuses_linked_results(tmp_path):
    place = experiments.made(tmp_path, 'script = "job.sh"\n')
    (tmp_path / "linked").symlink_to(place.top)
    moved = place.database.rename(tmp_path / "elsewhere.sqlite")
    place.database.symlink_to(moved)
    for directory in (tmp_path / "linked", place.top):
        with pytest.raises(Refused, match="is not a results directory of an experiment; vmgr"):
            CliRunner().invoke(
                experiment, ["resume", str(directory)], catch_exceptions=False,
                obj=tmp_path / "site.toml",
            )  # fmt: skip


@pytest.fixture
def vmgr(tmp_path, monkeypatch):
    """Return a function that calls ``vmgr experiment`` with the double of the batch system."""
    monkeypatch.setattr(batch, "site_batch", lambda config, interval: experiments.double(tmp_path))
    monkeypatch.setattr("vtorque_experiment.versions.collect_versions", lambda config: {})

    def call(*argv):
        done = CliRunner().invoke(experiment, argv, obj=tmp_path / "site.toml")
        await_jobs(tmp_path)
        return done

    return call


def begin(top, vmgr, text=TWO):
    """Begin an experiment whose time limit ends it before it submits a point."""
    file = experiments.write(top, text)
    (top / "batch" / "jobs").mkdir(exist_ok=True)
    done = vmgr("run", str(file), "--dir", str(top / "results"), "--hours", "1e-9")
    assert done.exit_code == 5, done.output
    return validate_place(top / "results")


def change_script(place):
    (place.scripts / "0-job.sh").write_text(EVIL.format(top=place.top.parent))


def change_options(place):
    text = place.definition.read_text()
    place.definition.write_text(f'batch = ["-v", "LD_PRELOAD=/home/ada/evil.so"]\n{text}')


def change_to_bare(place):
    place.definition.write_text(f"matrix.bare = [true]\n{place.definition.read_text()}")


def change_book(place):
    with contextlib.closing(sqlite3.connect(place.database)) as there, there:
        there.execute("UPDATE about SET value = '/tmp/evil' WHERE name = 'root'")


CHANGES = [change_script, change_options, change_to_bare, change_book]


@pytest.mark.parametrize("change", CHANGES)
def test_resume_does_not_submit_a_changed_plan(tmp_path, vmgr, change):
    place = begin(tmp_path, vmgr)
    change(place)
    seal = refused_seal(vmgr("resume", str(place.top)))
    assert not (tmp_path / "batch" / "submissions").exists()
    assert vmgr("resume", str(place.top), "--accept", seal).exit_code == 0
    assert len(submissions(tmp_path)) == 2
    assert not [path for path in tmp_path.glob("vtorque-experiment-*/*") if seal in path.name]


def refused_seal(done):
    """Return the seal of the plan that the user has to accept."""
    assert isinstance(done.exception, Refused), done.output
    said, seal = str(done.exception).split(" --accept ")
    there = Path(re.search("check it in (.*), then", said)[1])
    assert {path.name for path in there.iterdir()} == {"plan.json", "0-job.sh"}
    return seal


def test_plan_changed_by_a_guest_after_review_is_not_accepted(tmp_path, vmgr):
    place = begin(tmp_path, vmgr)
    change_to_bare(place)
    seal = refused_seal(vmgr("resume", str(place.top)))
    change_script(place)
    assert refused_seal(vmgr("resume", str(place.top), "--accept", seal)) != seal
    assert not (tmp_path / "batch" / "submissions").exists()


def test_resume_after_corrections_of_take_and_exit_codes_needs_no_accept(tmp_path, vmgr):
    place = begin(tmp_path, vmgr)
    text = place.definition.read_text()
    place.definition.write_text(f'{text}take.rate.pattern = "rate (.*)"\nexit_codes = [0, 4]\n')
    assert vmgr("resume", str(place.top)).exit_code == 0
    assert {row.state for row in experiments.rows(tmp_path)} == {DONE}


def test_resume_on_another_host_needs_accept(tmp_path, vmgr, monkeypatch):
    place = begin(tmp_path, vmgr)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(plan, "SEALS", other)
    seal = refused_seal(vmgr("resume", str(place.top)))
    assert vmgr("resume", str(place.top), "--accept", seal).exit_code == 0


def test_combination_of_a_point_is_not_read_from_the_database(tmp_path, vmgr):
    text = 'script = "job.sh"\nmatrix.bare = [true, false]\n'
    place = begin(tmp_path, vmgr, text)
    with contextlib.closing(sqlite3.connect(place.database)) as there, there:
        there.execute("UPDATE cells SET axes = ?", (json.dumps({"bare": True}),))
        there.execute("UPDATE points SET cell = 0")
    assert vmgr("resume", str(place.top)).exit_code == 0
    options = [argv[argv.index("-vm") + 1] for argv in submissions(tmp_path)]
    assert sorted(options) == ["keep=false", "none"]


def test_point_reset_by_a_guest_is_submitted_at_most_three_times(tmp_path):
    place = experiments.made(tmp_path, 'script = "job.sh"\nlimits.jobs = 1\n')
    stop = threading.Event()

    def rewind():
        while not stop.is_set():
            with (
                contextlib.suppress(sqlite3.Error),
                contextlib.closing(sqlite3.connect(place.database)) as there, there,
            ):  # fmt: skip
                there.execute("UPDATE points SET state = 'waiting' WHERE state = 'submitted'")
            (place.point(1) / "claim").unlink(missing_ok=True)
            time.sleep(0.01)

    guest = threading.Thread(target=rewind)
    guest.start()
    try:
        experiments.run(tmp_path)
    finally:
        stop.set()
        guest.join()
    await_jobs(tmp_path)
    (row,) = experiments.rows(tmp_path)
    assert len(submissions(tmp_path)) <= 3
    assert row.state in (DONE, FAILED)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE cells SET axes = 'no JSON'",
        "UPDATE about SET value = 'never' WHERE name = 'asked'",
        "UPDATE points SET cell = 77",
        "DROP TABLE numbers",
        "ALTER TABLE points RENAME TO dots",
    ],
)
def test_damaged_database_ends_in_a_message(tmp_path, vmgr, damage):
    place = begin(tmp_path, vmgr)
    with contextlib.closing(sqlite3.connect(place.database)) as there, there:
        there.execute("INSERT OR REPLACE INTO about VALUES ('asked', '0')")
        there.execute(damage)
    done = vmgr("resume", str(place.top))
    assert done.exception is None or isinstance(done.exception, Refused | HostFault | SystemExit), (
        done.exception
    )


def test_journal_planted_by_a_guest_removes_no_file_of_the_user(tmp_path):
    """SQLite deletes the file that a journal names as its super-journal, whichever file that is."""
    place = experiments.made(tmp_path, 'script = "job.sh"\n')
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(precious)
    head = magic + struct.pack(">IIIII", 0, 1, 2, 512, 4096)
    end = struct.pack(">II", len(name), sum(name)) + magic
    planted = Path(f"{place.database}-journal")
    planted.write_bytes(head.ljust(512, b"\0") + struct.pack(">I", 0x40001) + name + end)
    assert experiments.run(tmp_path).finished
    await_jobs(tmp_path)
    assert precious.read_text() == "mine\n"
    assert {row.state for row in experiments.rows(tmp_path)} == {DONE}


def test_database_behind_a_link_is_not_read(tmp_path):
    place = experiments.made(tmp_path, 'script = "job.sh"\n')
    moved = place.database.rename(tmp_path / "elsewhere.sqlite")
    place.database.symlink_to(moved)
    with pytest.raises(HostFault, match=r"results\.sqlite: "):
        Book(place.database)


def test_seals_ignore_directories_that_others_can_write(tmp_path, monkeypatch):
    """Another user may create the usual names in /var/tmp, where the owner cannot remove them."""
    monkeypatch.setattr(plan, "SEALS", tmp_path)
    squatted, own = tmp_path / f"vtorque-experiment-{os.geteuid()}", tmp_path / "own"
    squatted.mkdir()
    squatted.chmod(0o777)
    own.mkdir(mode=0o700)
    Path(f"{squatted}-0").symlink_to(own)
    made = plan.ExperimentPlan(
        "0" * 6, "/", 1, 1, definition.parse_definition({"script": "a"}, "e"), {"a": b""}
    )
    assert not plan.has_seal(made)
    plan.keep_seal(made)
    assert plan.has_seal(made)
    assert not [*squatted.iterdir(), *own.iterdir()]


def test_copy_that_replaces_the_experiments_file_follows_no_link(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine\n")
    file = experiments.write(tmp_path, 'script = "job.sh"\n')
    top = tmp_path / "results"
    (top / "scripts").mkdir(parents=True)
    for name in ("experiment.toml", "versions.json", "scripts/0-job.sh", "results.new"):
        (top / name).symlink_to(target)
    experiments.create.create(file, validate_place(top), dict)
    assert target.read_text() == "mine\n"


def test_write_follows_no_link(tmp_path):
    (tmp_path / "d").symlink_to("/tmp")
    with pytest.raises(NotADirectoryError):
        files.write(tmp_path, "d", "x", content=b"")
