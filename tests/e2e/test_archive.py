"""Kept records of a real job are copied to its owner's home, and read like on another host."""

import json
import shutil

import pytest

pytestmark = pytest.mark.e2e

OTHER = "vte2e2"


@pytest.fixture
def archive(clean, config):
    """Enable the plugin for one test; return the user's directory."""
    config("plugin.archive", 'directory = "{home}/.vtorque/jobs"')
    yield clean.home / ".vtorque" / "jobs"
    shutil.rmtree(clean.home / ".vtorque", ignore_errors=True)


@pytest.fixture
def elsewhere(clean):
    """Return a function that hides the node's records: only those in the home are visible then."""

    def go():
        shutil.rmtree(clean.state / "kept")

    return go


def written(node, directory, count):
    """Wait for this number of complete files."""
    return node.wait_for(
        lambda: len(found := sorted(directory.glob("[!.]*.zip"))) == count and found,
        60,
        "the archive",
    )


def test_records_of_a_job_and_of_a_refused_job_are_readable_on_other_hosts(
    clean, archive, elsewhere
):
    result = clean.job("#!/bin/sh\necho out\nexit 3\n")
    assert result.code == 3
    job = result.done.stdout.decode().split()[0]
    (path,) = written(clean, archive, 1)
    entry = path.stat()
    assert (entry.st_uid, entry.st_mode & 0o777) == (clean.home.stat().st_uid, 0o600)
    assert archive.stat().st_mode & 0o777 == 0o700
    elsewhere()

    assert (
        f"Job {job} (t): ended, exit code 3" in clean.as_user("vmgr", "report", job).stdout.decode()
    )
    assert b"exit code 3" in clean.as_user("vmgr", "report", "--last").stdout
    log = clean.as_user("vmgr", "logs", job).stdout
    assert b"the guests are ready after" in log and b"core: times: start" in log
    listed = json.loads(clean.as_user("vmgr", "ps", "--all", "--json").stdout)
    (mine,) = [each for each in listed if each["id"] == job]
    assert (mine["reason"], mine["name"], mine["owner"]) == ("exit code 3", "t", clean.user)

    assert (
        b"this node has no records"
        in clean.as_user("vmgr", "report", job, user=OTHER, check=False).stderr
    )
    refused = clean.root("vmgr", "report", job, check=False)
    assert refused.returncode == 2 and b"sudo -u OWNER" in refused.stderr
    assert clean.as_user("/bin/cat", str(path), user=OTHER, check=False).returncode != 0


@pytest.mark.full
def test_failed_start_is_explained_in_the_archive(clean, config, archive, elsewhere):
    config("node", "start_timeout = 1")
    result = clean.job("#!/bin/sh\ntrue\n")
    assert result.code != 0
    written(clean, archive, 1)
    elsewhere()
    job = result.done.stdout.decode().split()[0]
    said = clean.as_user("vmgr", "report", job).stdout.decode()
    assert (why := said.splitlines()[1].strip()) and why[:60] in result.err.decode()
    assert b"ERROR" in clean.as_user("vmgr", "logs", job).stdout
