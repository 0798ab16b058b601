"""Archives of ended jobs in users' directories: content, limits, and reading."""

import contextlib
import io
import json
import os
import pwd
import stat
import subprocess
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from forked import call
from patience import eventually
from vtorque_archive import node, pack, plugin, read, send, write
from vtorque_archive.plugin import Settings, directory_of
from vtorque_core.api import JobAttempt, Paths, kept_records
from vtorque_core.cli.vmgr import main
from vtorque_core.live import kept_jobs
from vtorque_report import load
from vtorque_testing import vmgr

ME = pwd.getpwuid(os.getuid())
JOB = JobAttempt("42.srv", 0, ME.pw_name, ME.pw_uid, "n1.site")
LINE = {"t": 1.0, "level": "INFO", "logger": "vtorque_archive.x", "plugin": "core"}
LINE |= {"phase": "run", "guest": None, "node": "n1.site", "job": "42.srv", "message": "hello"}


@pytest.fixture
def paths(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "state").mkdir()
    return Paths(tmp_path / "state", tmp_path / "run")


def place_of(paths, job=JOB, **facts):
    """Return a node's records of a job."""
    place = kept_records.place(paths, job)
    known = {"job": job.id, "attempt": job.attempt, "owner": job.owner, "node": job.node}
    place.add_facts(**known, started=100.0, ended=103.0, **facts)
    place.write("log.jsonl", json.dumps(LINE | {"node": job.node}).encode() + b"\n")
    place.write("console-g0.log", b"panic\n")
    return place


def sent(place, **more):
    """Start the writer; return when the archive is written."""
    os.waitpid(send.send(place, Settings(**more)), 0)


def template(tmp_path):
    return f"{tmp_path}/{{user}}/jobs"


def archive_directory(tmp_path):
    return tmp_path / ME.pw_name / "jobs"


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# -- Writing ---------------------------------------------------------------------------------------


def test_each_node_and_attempt_has_one_archive(paths, tmp_path):
    place = place_of(paths)
    for _ in range(2):  # the second replaces the first
        sent(place, directory=template(tmp_path))
        assert names(archive_directory(tmp_path)) == ["42.srv.0@n1.site.zip"]
    (path,) = archive_directory(tmp_path).iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(archive_directory(tmp_path).stat().st_mode) == 0o700
    assert (path.stat().st_uid, path.stat().st_gid) == (ME.pw_uid, ME.pw_gid)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["job.json", "log.jsonl", "console-g0.log"]
        assert all(archive.read(name) == place.read(name) for name in archive.namelist())


def test_no_archive_is_written_without_a_directory_setting(paths, tmp_path):
    place, before = place_of(paths), names(tmp_path)
    site = {Settings: Settings()}
    node.vtorque_job_ended(place, site)
    assert names(tmp_path) == before
    site = {Settings: Settings(directory=template(tmp_path))}
    node.vtorque_job_ended(place, site)
    eventually(lambda: list(archive_directory(tmp_path).glob("*.zip")))


def test_archives_of_other_nodes_attempts_and_odd_job_ids_have_distinct_names(paths, tmp_path):
    for job, host in (("42.srv", "n2"), ("43[1].srv", "n1/../x"), ("44.srv", "")):
        attempt = JobAttempt(job, 1, ME.pw_name, ME.pw_uid, host)
        sent(place_of(paths, attempt), directory=template(tmp_path))
    found = names(archive_directory(tmp_path))
    assert found[0] == "42.srv.1@n2.zip" and found[1] == "44.srv.1@node.zip"
    assert found[2].startswith("j43_1_.srv-") and found[2].endswith(".1@n1_.._x.zip")
    assert all(pack.key_of(name) for name in found)


def noted(place, tmp_path, code):
    """Run the job shell's command, as at the end of a script."""
    site = {Settings: Settings(directory=template(tmp_path))}
    (argv,) = plugin.vtorque_after_script(place, code, site)
    subprocess.run(argv, check=True, timeout=60)


def test_job_shell_notes_the_exit_code(paths, tmp_path):
    """Slurm and OpenPBS do not pass it to the epilogue. A code that root knows takes precedence."""
    place = place_of(paths)
    for known, said in ((None, "7"), ("3", "3")):
        if known:
            place.add_facts(status=known)
        noted(place, tmp_path, 7)
        assert stat.S_IMODE(archive_directory(tmp_path).stat().st_mode) == 0o700
        assert [p.key for p in read.archives(paths, archive_directory(tmp_path), ME.pw_uid)] in (
            [],
            ["42.srv.0"],
        )
        sent(place, directory=template(tmp_path))
        (found,) = read.archives(paths, archive_directory(tmp_path), ME.pw_uid)
        assert found.facts()["status"] == said
        assert names(archive_directory(tmp_path)) == [found.path.name], (
            "the job shell's note is left"
        )


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"7" * 99, b"\xb2"])
def test_invalid_note_is_not_used_as_exit_code(paths, tmp_path, content):
    place = place_of(paths)
    noted(place, tmp_path, 7)
    (note,) = archive_directory(tmp_path).iterdir()
    note.write_bytes(content)
    sent(place, directory=template(tmp_path))
    (found,) = read.archives(paths, archive_directory(tmp_path), ME.pw_uid)
    assert found.facts().get("status") in (None, "77777")


def test_no_note_is_written_without_a_directory_setting(paths):
    assert list(plugin.vtorque_after_script(place_of(paths), 7, {Settings: Settings()})) == []


def test_files_above_the_limit_are_left_out_and_named():
    noise = os.urandom(3 << 20)
    files = [("job.json", b"{}"), ("log.jsonl", b"x" * (8 << 20)), ("console-g0.log", noise),
             ("series.jsonl", b"small")]  # fmt: skip
    packed = pack.pack_files(files, 1 << 20)
    assert len(packed) <= 1 << 20
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.namelist() == ["job.json", "log.jsonl", "series.jsonl", "left-out.txt"]
        assert b"console-g0.log" in archive.read("left-out.txt")
        assert archive.read("log.jsonl") == files[1][1]


@given(
    strategies.lists(strategies.binary(max_size=3000), max_size=12),
    strategies.integers(4000, 20000),
)
def test_archive_never_exceeds_its_limit(contents, limit):
    files = [(f"f{n}.log", content) for n, content in enumerate(contents)]
    packed = pack.pack_files(files, limit)
    assert len(packed) <= limit
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.testzip() is None


def test_cleanup_removes_old_and_then_oldest_archives_but_no_other_file(tmp_path):
    def old(name, days, mib=0.0):
        (tmp_path / name).write_bytes(bytes(int(mib * (1 << 20))))
        os.utime(tmp_path / name, (now - days * 86400,) * 2)

    now = 2e9
    limits = Settings(directory="/{user}", mib=4, file_mib=1, days=30)
    old("1.srv.0@n1.zip", 31)
    old("2.srv.0@n1.zip", 3, 1.5)
    old("3.srv.0@n1.zip", 2, 1.5)
    old("4.srv.0@n1.zip", 1, 1.5)
    old("thesis.zip", 400, 9)
    old("5.srv@n1.zip.txt", 400, 9)
    old(".vtorque-unfinished-aa", 1)
    old(".vtorque-unfinished-bb", 0)
    (tmp_path / "6.srv.0@n1.zip").symlink_to("thesis.zip")
    (tmp_path / "7.srv.0@n1.zip").mkdir()
    write.write(tmp_path, "9.srv.0@n1.zip", [("job.json", b"{}")], limits, now)
    left = ["3.srv.0@n1.zip", "4.srv.0@n1.zip", "5.srv@n1.zip.txt", "6.srv.0@n1.zip"]
    left += ["7.srv.0@n1.zip", "9.srv.0@n1.zip", "thesis.zip"]
    assert names(tmp_path) == [".vtorque-unfinished-bb", *left]


def test_failed_write_keeps_the_old_archive(tmp_path, monkeypatch):
    limits = Settings(directory="/{user}")
    write.write(tmp_path, "9.srv.0@n1.zip", [("job.json", b"{}")], limits, 1.0)
    before = (tmp_path / "9.srv.0@n1.zip").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write.write(tmp_path, "9.srv.0@n1.zip", [("job.json", b"{1}")], limits, 1.0)
    assert names(tmp_path) == ["9.srv.0@n1.zip"]
    assert (tmp_path / "9.srv.0@n1.zip").read_bytes() == before


def test_link_in_place_of_the_directory_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "jobs").symlink_to("elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        write.write(tmp_path / "jobs", "9.srv.0@n1.zip", [], Settings(), 1.0)
    assert names(tmp_path / "elsewhere") == []


@pytest.mark.parametrize(
    ("given_", "said"),
    [({"directory": "jobs/{user}"}, "absolute path"), ({"directory": "/all"}, "must differ"),
     ({"directory": "/x/{shell}"}, "{home} {user} {uid}"),
     ({"directory": "{home}/../x"}, "without"), ({"file_mib": 0}, "must be 1 to 256"),
     ({"file_mib": 20, "mib": 10}, "1 to 256, and at most mib"), ({"days": 0.0}, "days=0.0")],
)  # fmt: skip
def test_invalid_settings_are_refused(given_, said):
    with pytest.raises(ValueError, match=said):
        Settings(**given_)


def test_directory_template_is_expanded():
    assert directory_of("{home}/.vtorque/{user}-{uid}", ME) == Path(
        f"{ME.pw_dir}/.vtorque/{ME.pw_name}-{ME.pw_uid}"
    )


# -- Reading ---------------------------------------------------------------------------------------


def forged(directory, content=b"", key="66.srv.0"):
    """Return the archive that is found for a user who has put a file with this content there."""
    directory.mkdir(exist_ok=True)
    (directory / f"{key}@n1.zip").write_bytes(content)
    (found,) = read.archives(Paths(), directory, ME.pw_uid)
    return found


def zipped(files, method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return buffer.getvalue()


def test_written_archive_is_read_back(paths, tmp_path):
    place = place_of(paths)
    sent(place, directory=template(tmp_path))
    (found,) = read.archives(paths, archive_directory(tmp_path), ME.pw_uid)
    assert found.facts() == place.facts() and found.key == place.key
    assert abs(found.changed - place.changed) < 3600
    for name in names(place.directory):
        with os.fdopen(found.open(name), "rb") as file:
            assert file.read() == found.read(name) == place.read(name)
    assert found.read("log.jsonl", 7) == place.read("log.jsonl", 7)
    with pytest.raises(FileNotFoundError):
        found.read("series.jsonl")
    assert list(read.archives(paths, tmp_path / "not there", 1)) == []


def test_compressed_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MAX_BYTES", 1 << 20)
    bomb = zipped([("job.json", bytes(64 << 20)), ("log.jsonl", bytes(64 << 20))])
    assert len(bomb) < 1 << 18
    found = forged(tmp_path / "jobs", bomb)
    assert found.facts() == {}
    assert len(found.read("job.json")) <= 1 << 20


def test_data_read_from_all_archives_is_bounded(tmp_path, monkeypatch):
    """A job's guest can write to its user's home, and ask the node for its logs and reports."""
    monkeypatch.setattr(read, "_left", 1 << 20)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    bomb = zipped([("job.json", b'{"job": "66.srv"}'), ("log.jsonl", bytes(700 << 10))])
    found = [forged(tmp_path / f"{n}", bomb) for n in range(9)]
    opened = [each.open("log.jsonl") for each in found]
    sizes = [os.fstat(descriptor).st_size for descriptor in opened]
    assert sizes == [700 << 10, 324 << 10, *([0] * 7)]
    assert load.report(found[:1], 1.0).attempts[0].job == "66.srv"
    assert names(tmp_path / "tmp") == []
    for descriptor in opened:
        os.close(descriptor)


def test_links_pipes_and_other_compression_methods_are_refused(tmp_path):
    found = forged(tmp_path / "jobs", zipped([("job.json", b"{}")], zipfile.ZIP_LZMA))
    with pytest.raises(OSError, match="does not write"):
        found.read("job.json")
    found.path.rename(tmp_path / "file")
    found.path.symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        found.read("job.json")
    found.path.unlink()
    os.mkfifo(found.path)
    with pytest.raises(OSError, match="is not a regular file"):
        found.read("job.json")
    found.path.unlink()
    with found.path.open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(OSError, match="larger than 256 MiB"):
        found.read("job.json")


GOOD = zipped([("job.json", b'{"job": "66.srv"}'), ("log.jsonl", b"{}\n" * 50)])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strategies.data())
def test_corrupt_archive_raises_oserror_or_returns_bytes(tmp_path, data):
    content = bytearray(GOOD)
    for at in data.draw(strategies.lists(strategies.integers(0, len(GOOD) - 1), max_size=8)):
        content[at] = data.draw(strategies.integers(0, 255))
    content = content[: data.draw(strategies.integers(0, len(GOOD)))] or content
    found = forged(tmp_path / "jobs", bytes(content))
    with contextlib.suppress(OSError):
        assert isinstance(found.read("log.jsonl"), bytes)
    assert isinstance(found.facts(), dict)


# -- Through vmgr ----------------------------------------------------------------------------------


@pytest.fixture
def site(paths, tmp_path, monkeypatch):
    """Return the config of a front end, on which no job has run. The caller is not root."""
    config = tmp_path / "vtorque.toml"
    config.write_text(
        f'[paths]\nstate = "{tmp_path}/nothing"\nrun = "{tmp_path}/nothing"\n'
        f'[batch]\nsystem = "local"\n[plugin.archive]\ndirectory = "{template(tmp_path)}"\n'
    )
    return SimpleNamespace(config=config, paths=paths, template=template(tmp_path))


def run_vmgr(site, *argv):
    """Run vmgr as a user (with a hidden euid under root), since root reads no such file."""

    def run():
        os.geteuid = lambda: 4321
        main()

    return call(run, ["vmgr", "--config", str(site.config), *argv], {**os.environ}, "/")


def test_report_logs_and_console_are_shown_from_an_archive(site):
    sent(place_of(site.paths, status="3"), directory=site.template)
    other = JobAttempt("42.srv", 0, ME.pw_name, ME.pw_uid, "n2")
    sent(place_of(site.paths, other), directory=site.template)
    for argv in (("report", "42.srv"), ("report", "42"), ("report", "--last")):
        done = run_vmgr(site, *argv)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Job 42.srv: ended, exit code 3" in done.stdout
        assert "on n1.site, n2" in done.stdout or "on n2, n1.site" in done.stdout
        assert "\nn2 " in done.stdout and "\nn1.site " in done.stdout, "the report lacks a node"
    shown = run_vmgr(site, "logs", "42.srv").stdout
    assert "n1.site " in shown and "n2 " in shown and shown.count("core: hello") == 2
    assert run_vmgr(site, "logs", "--console", "42.srv").stdout == "panic\n"


def test_array_tasks_have_one_report(site):
    ids = [f"22[{n}].srv" for n in (0, 2, 10)]
    for number, job in enumerate(ids):
        attempt = JobAttempt(job, 0, ME.pw_name, ME.pw_uid, f"n{number}")
        sent(place_of(site.paths, attempt, status=str(number)), directory=site.template)
    sent(place_of(site.paths), directory=site.template)
    for wanted in ("22[]", "22[].srv", "22"):
        done = run_vmgr(site, "report", wanted)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Job array 22[].srv: ")
        rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("22[")]
        assert rows == ids
    data = json.loads(run_vmgr(site, "report", "--json", "22[]").stdout)
    assert [each["status"] for each in data["elements"]] == [0, 1, 2]
    page = Path(site.config.parent, "page.html")
    assert run_vmgr(site, "report", "22[]", "--html", str(page)).returncode == 0
    assert all(job in page.read_text() for job in ids)
    assert "Job 22[2].srv: ended, exit code 1" in run_vmgr(site, "report", "22[2]").stdout
    assert "jobs with separate logs: name one of 22[0].srv" in run_vmgr(site, "logs", "22[]").stderr


def test_forged_archive_causes_no_traceback(site, tmp_path):
    sent(place_of(site.paths, status="0"), directory=site.template)
    facts = {"job": "66.srv\x1b[2J", "node": ["x"], "nodes": 7, "name": "n" * 9**6}
    facts |= {"started": 1e400, "ended": "x", "status": {"a": 1}}
    facts |= {"phases": [[[]]], "guests": {"a": 1}}
    forged_ = zipped([("job.json", json.dumps(facts)), ("log.jsonl", b"\0\xff" * 9999)])
    (archive_directory(tmp_path) / "66.srv.0@n1.zip").write_bytes(forged_)
    (archive_directory(tmp_path) / "67.srv.0@n1.zip").write_bytes(b"PK")
    for argv in (("report", "66.srv"), ("report", "67.srv"), ("report", "--last"),
                 ("logs", "66.srv"), ("logs", "67.srv"), ("report", "42.srv")):  # fmt: skip
        done = run_vmgr(site, *argv)
        assert "Traceback" not in done.stderr and "\x1b" not in done.stdout + done.stderr
        assert (done.returncode == 0) == (argv != ("report", "67.srv") and "--last" not in argv)
        assert len(done.stdout) < 10000


def test_root_reads_no_archive_of_a_user(site):
    sent(place_of(site.paths), directory=site.template)
    if os.geteuid() == 0:
        done = vmgr.run(site.config, "report", "42.srv")
        assert "sudo -u OWNER" in str(done.exception)
    assert run_vmgr(site, "report", "42.srv").returncode == 0


def test_records_of_the_node_come_before_its_archive(site, monkeypatch):
    place = place_of(site.paths, status="1")
    sent(place, directory=site.template)
    place.add_facts(status="2")
    text = site.config.read_text().replace(
        f"{site.config.parent}/nothing", str(site.paths.state), 1
    )
    site.config.write_text(text)
    monkeypatch.setattr(os, "geteuid", lambda: ME.pw_uid or 4321)
    (job,) = kept_jobs.jobs(site.config, "42.srv")
    assert [each.directory for each in job.places] == [place.directory]
    assert job.places[0].facts()["status"] == "2"


def test_exit_code_note_does_not_follow_a_link(tmp_path):
    """Root in a guest can write into the user's directory, too."""
    precious = tmp_path / "results"
    precious.write_text("precious")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/note").symlink_to(precious)
    argv = ["/bin/sh", "-c", plugin._NOTE, "sh", tmp_path / "jobs", "note", "3"]
    subprocess.run(argv, check=True)
    assert precious.read_text() == "precious"
    assert (tmp_path / "jobs/note").read_text() == "3\n"


def test_nodes_of_a_job_are_sorted(tmp_path):
    names = [f"9.0@n{number}.zip" for number in (2, 1, 3, 2, 5, 4)]
    for name in names:
        (tmp_path / name).touch()
    found = [each.path.name for each in read.archives(Paths(), tmp_path, ME.pw_uid)]
    assert found == sorted({*names})
