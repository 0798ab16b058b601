"""Ended jobs are shown on the head, where none has run: of several nodes, and whole arrays."""

import json

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.full]


def test_ended_jobs_of_two_nodes_and_arrays_are_shown_on_the_head_node(clean, archive):
    clean.submit("#!/bin/sh\nsleep 1\n", "-N2", "-wn1,n2", "-J", "two")
    clean.wait(lambda: len(list(archive.glob("[!.]*.zip"))) == 2, what="both nodes' files")
    job = next(archive.glob("[!.]*.zip")).name.partition(".")[0]
    assert {path.name.partition("@")[2] for path in archive.glob("[!.]*")} == {"n1.zip", "n2.zip"}
    said = clean.user("vmgr", "report", "--last").stdout.decode()
    assert said.startswith(f"Job {job}") and "on n1, n2" in said
    assert "\nn1 " in said and "\nn2 " in said
    log = clean.user("vmgr", "logs", job).stdout.decode()
    assert "n1 " in log and "n2 " in log and log.count("the guests are ready after") == 2

    script = "#!/bin/sh\nexit $SLURM_ARRAY_TASK_ID\n"
    first = clean.submit(script, "-a", "0-1", "-wn1")
    clean.wait(lambda: len(list(archive.glob("[!.]*.zip"))) == 4, what="both elements' files")
    said = clean.user("vmgr", "report", first).stdout.decode()
    assert said.startswith(f"Job array {first}_*: ")
    assert f"\n{first}_0 " in said and f"\n{first}_1 " in said
    data = json.loads(clean.user("vmgr", "report", "--json", f"{first}_1").stdout)
    assert (data["known_as"], data["status"]) == (f"{first}_1", 1), (
        "the exit code or the array's id is missing"
    )
    listed = json.loads(clean.user("vmgr", "ps", "--all", "--json").stdout)
    assert len([each for each in listed if each["state"] == "ended"]) == 3
