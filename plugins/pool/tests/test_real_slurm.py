"""The programs under a real slurmctld. The machines are doubles: slurmds in pid namespaces."""

import json

import pytest

from slurm_world import SlurmWorld

pytestmark = pytest.mark.e2e


@pytest.fixture
def world(tmp_path):
    with SlurmWorld(tmp_path) as found:
        yield found


def test_jobs_start_nodes_up_to_the_limit_and_idle_nodes_end(world):
    jobs = [world.submit("echo ran on $SLURMD_NODENAME; sleep 1") for _ in range(10)]
    most = set()

    def all_ended():
        most.update(world.machines())
        assert len(world.machines()) <= 3
        return not world.jobs()

    world.wait(all_ended, "the jobs' end")
    said = [(world.top / "out" / job).read_text() for job in jobs]
    assert {line.strip() for line in said} == {f"ran on {name}" for name in world.names}
    assert most == set(world.names)
    world.wait(lambda: not world.machines(), "the nodes leave")
    assert "Slurm resumes it" in world.log() and "Slurm suspends it" in world.log()
    world.wait(lambda: "no machines" in world.pool(), "all nodes are off")


@pytest.mark.full
def test_job_of_two_nodes_starts_both_and_runs_once_on_each(world):
    job = world.submit("echo began; srun sh -c 'echo ran on $SLURMD_NODENAME'", "-N", "2")
    world.wait(lambda: not world.jobs(), "the job's end")
    began, *ran = (world.top / "out" / job).read_text().splitlines()
    assert (began, sorted(ran)) == ("began", ["ran on cloud1", "ran on cloud2"])
    assert " Restarts=0 " in world.run("scontrol", "-o", "show", "job", job)
    world.wait(lambda: not world.machines(), "the nodes leave")


@pytest.mark.full
def test_stock_out_pauses_the_shape_until_an_admin_releases_it(world):
    full = world.top / "cloud" / "full"
    full.touch()
    job = world.submit("echo ran", "-w", "cloud1")

    def paused():
        return "paused for" in world.pool()

    world.wait(paused, "the pause")
    assert world.machines() == []
    assert world.log().count("no machine: no such machine to give") == 2
    world.wait(lambda: "maintenance" in world.jobs()[job], "the job waits for the pause's end")
    full.unlink()
    world.pool("release", "small")
    world.wait(lambda: not world.jobs(), "the job's end")
    assert (world.top / "out" / job).read_text() == "ran\n"
    assert "paused" not in world.pool()


@pytest.mark.full
def test_machine_that_never_registers_is_ended_and_replaced(world):
    never = world.top / "cloud" / "never"
    never.touch()
    job = world.submit("echo ran")
    world.wait(world.machines, "a machine")
    never.unlink()
    world.wait(lambda: "slurmd did not register within" in world.log(), "the start's end")
    world.wait(lambda: not world.jobs(), "the job's end")
    assert (world.top / "out" / job).read_text() == "ran\n"
    world.wait(lambda: not world.machines(), "no machine is left")
    assert world.run("sinfo", "-h", "-a", "-R").strip() == ""


@pytest.mark.full
@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
def test_killed_resume_leaves_no_machine_and_no_node(world, when):
    (world.top / "cloud" / when).touch()
    job = world.submit("echo ran")
    world.wait(lambda: not (world.top / "cloud" / when).exists(), "the kill")

    def tidied():
        world.pool("tidy")
        return not world.jobs()

    world.wait(tidied, "the job's end")
    assert (world.top / "out" / job).read_text() == "ran\n"
    world.wait(lambda: not world.machines(), "no machine is left")


@pytest.mark.full
def test_machine_that_vanishes_with_a_job_is_replaced_and_the_job_requeued(world):
    job = world.submit("echo began; sleep 3; echo ended", "--requeue", "--open-mode=append")
    world.wait(lambda: world.jobs()[job].startswith("RUNNING"), "the job runs")
    cloud = world.top / "cloud"
    [path] = cloud.glob("m-*.json")
    world.run("kill", "-9", str(json.loads(path.read_text())["pid"]))
    path.unlink()

    def tidied():
        world.pool("tidy")
        return not world.jobs()

    [row] = json.loads(world.pool("--json"))["nodes"]
    assert (row["node"], row["state"], row["machine"], row["jobs"]) == ("cloud1", "busy", "", [job])
    world.run("scontrol", "update", "nodename=cloud1", "state=down", "reason=Not responding")
    world.wait(tidied, "the job's end")
    assert (world.top / "out" / job).read_text().endswith("began\nended\n")


@pytest.mark.full
def test_held_node_keeps_its_machine_until_destroyed(world):
    job = world.submit("true")
    world.wait(
        lambda: world.jobs().get(job, "").startswith("RUNNING") or not world.jobs(), "a node"
    )
    world.pool("hold", "cloud1")
    world.wait(lambda: not world.jobs(), "the job's end")
    world.wait(lambda: "kept, because it is held" in world.log(), "Slurm suspends it")
    assert world.machines() == ["cloud1"]
    assert "hold" in world.pool()
    world.pool("tidy")
    assert world.machines() == ["cloud1"]
    world.pool("destroy", "cloud1")
    assert world.machines() == []
