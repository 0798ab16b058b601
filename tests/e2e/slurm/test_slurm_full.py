"""Long tests on a real Slurm: a queue of 200 VM jobs, MPI over two nodes, a held job."""

import os
import re

import pytest

import slurm_cluster as slurm

pytestmark = pytest.mark.e2e

IMAGE = "debian-mpi"
MPI = ("-vm", f"img={IMAGE},ram=768M,vcpus=2")


@pytest.mark.full
@pytest.mark.parametrize("count", [9, 200])
def test_queue_of_jobs_runs_to_its_end(clean, count):
    """Single jobs and array tasks, successful and failing, must each run exactly once."""
    place = clean.home / f"soak{count}"
    place.mkdir()
    os.chown(place, slurm.UID, slurm.UID)
    script = clean.script(
        f"#!/bin/sh\necho $1 $(hostname) >> ~/{place.name}/$SLURM_JOB_ID\nexit $(($1 % 3))\n"
    )
    element = clean.script(
        "#!/bin/sh\n"
        f"echo a$SLURM_ARRAY_TASK_ID $(hostname) >> ~/{place.name}/$SLURM_JOB_ID\nexit 4\n",
        "element.sh",
    )
    elements = count // 3
    clean.user("vsub", "-o", "/dev/null", "-a", f"1-{elements}", element)
    for number in range(count - elements):
        clean.user("vsub", "-o", "/dev/null", "-J", f"n{number}", script, str(number))
    left = 30 + 15 * count
    clean.wait(lambda: not clean.root("head", "squeue", "-h"), left, "end of all jobs")
    lines = [path.read_text() for path in place.iterdir()]
    assert all(line.count("\n") == 1 for line in lines), "a job ran twice"
    done = {line.split()[0] for line in lines}
    expected = {str(n) for n in range(count - elements)} | {f"a{n + 1}" for n in range(elements)}
    assert done == expected
    assert {line.split()[1] for line in lines} == {"vn1", "vn2", "vn3"}
    if count < 100:  # Slurm forgets ended jobs after MinJobAge
        text = clean.root("head", "scontrol", "show", "job")
        codes = dict(re.findall(r"JobId=\d+ JobName=n(\d+)\n(?:.*\n)*?.* ExitCode=(\d+):0", text))
        assert {n: codes[n] for n in map(str, range(count - elements))} == {
            str(n): str(n % 3) for n in range(count - elements)
        }


@pytest.mark.full
def test_job_that_no_node_can_start_is_held(clean):
    """The job is held after two requeues, with the reason; the nodes stay usable."""
    for node in slurm.NODES:
        clean.stop_libvirt(node)
    try:
        job_id = clean.submit("#!/bin/sh\necho ran\n")
        show = ("scontrol", "show", "job", job_id)
        held = "Reason=job_requeued_in_held_state"
        record = clean.wait(
            lambda: held in (text := clean.root("head", *show)) and "(held; when" in text and text,
            120, "the job is held",
        )  # fmt: skip
        assert "Restarts=3" in record
        assert re.search(r"^   ReqNodeList=\S+ ExcNodeList=n1,n2,n3$", record, re.MULTILINE)
        assert re.search(r"AdminComment=vTorque: job \d+ did not start on n\d: .*libvirt", record)
        assert b"ran" not in clean.read("out")
    finally:
        clean.user("scancel", f"--user={slurm.USER}")
        for node in slurm.NODES:
            clean.start_libvirt(node)
            clean.root("head", "scontrol", "update", f"NodeName={node}", "Comment=")


@pytest.fixture
def nodes_alone(clean):
    """Return the cluster with a Slurm that reports no CPU ids; vsub requests nodes per user."""
    config = "/etc/vtorque/vtorque.toml"  # whose last table is [plugin.slurm]
    for machine in ("head", *slurm.NODES):
        clean.root(machine, "cp", config, f"{config}.before")
        more = 'echo "cpu_ids = false"; echo "exclusive = \\"user\\""'
        clean.root(machine, "sh", "-c", f"({more}) >> {config}")
    yield clean
    for machine in ("head", *slurm.NODES):
        clean.root(machine, "mv", f"{config}.before", config)


@pytest.mark.full
def test_exclusive_job_of_another_user_waits_in_the_slurm_queue(nodes_alone):
    cluster = nodes_alone
    args = ("vsub", "--parsable", "-wn1", "-n1", "--mem=900M", "-o", "/dev/null")
    first = cluster.user(*args, "--wrap", "sleep 600").stdout.decode().strip()
    cluster.wait(lambda: cluster.guests("n1"), what="guest")
    done = cluster.user(*args, "--wrap", "exit 3", user=slurm.OTHER)
    second = done.stdout.decode().strip()
    own = cluster.user(*args, "--wrap", "exit 4").stdout.decode().strip()
    cluster.wait_state(own, "FAILED")
    shown = cluster.show(second)
    assert (shown["JobState"], shown["OverSubscribe"]) == ("PENDING", "USER")
    cluster.user("scancel", first)
    cluster.wait_state(second, "FAILED")
    shown = cluster.show(second)
    assert (shown["ExitCode"], shown["Restarts"]) == ("3:0", "0")
    assert "AdminComment" not in shown


@pytest.fixture(scope="module")
def mpi(cluster):
    """Return the cluster with Debian's Open MPI in an image."""
    cluster.image(IMAGE, "-o", "packages=openmpi-bin")
    return cluster


@pytest.mark.full
def test_open_mpi_over_two_nodes(mpi, clean):
    """Ranks run in the guests of both, without a flag; srun and ssh reach the other guest."""
    code, out, err = clean.job(
        "#!/bin/bash\n"
        "srun -N2 sh -c 'echo task $SLURM_PROCID of $SLURM_NTASKS on $(hostname)'\n"
        "srun -N2 --ntasks-per-node=2 sh -c 'echo four $SLURM_PROCID on $(hostname)'\n"
        "srun -n1 echo one & srun -n1 echo two & wait\n"
        "ssh vn2 hostname\n"
        "mpirun sh -c 'echo rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $(hostname)'\n",
        "-N2", "-w", "n1,n2", *MPI,
    )  # fmt: skip
    assert code == 0, (out, err)
    lines = out.decode().splitlines()
    assert {"task 0 of 2 on vn1", "task 1 of 2 on vn2", "one", "two", "vn2"} <= set(lines)
    fours = sorted(line for line in lines if line.startswith("four"))
    assert fours == ["four 0 on vn1", "four 1 on vn1", "four 2 on vn2", "four 3 on vn2"]
    ranks = sorted(line for line in lines if line.startswith("rank"))
    assert ranks == [f"rank {n} of 4 on vn{n // 2 + 1}" for n in range(4)]
