"""Accounting records of VM jobs, with a real slurmdbd and MariaDB."""

import re

import pytest

import slurm_cluster as slurm

pytestmark = [pytest.mark.e2e, pytest.mark.full]

LIMITS = """
[[limits]]
qos = "gold"
[limits.options.vcpus]
max = 1
"""
CONFIG = "/etc/vtorque/vtorque.toml"
USED = re.compile(r"vtorque (n[123]): cpu=([1-9]\d*)s mem=([1-9]\d*)m")
SCRIPT = (
    "#!/bin/sh\n[ -z $SLURM_ARRAY_TASK_ID ] || exit 0\n"
    "x=0; while [ $x -lt 100000 ]; do x=$((x + 1)); done\n"
    "echo $SLURM_JOB_ID $SLURM_JOB_ACCOUNT $SLURM_JOB_QOS\n"
)


@pytest.fixture(scope="module")
def accounting_cluster(slurmdbd):
    """Return the cluster with an account and a qos, and limits on the nodes by these."""
    cluster = slurmdbd
    for node in slurm.NODES:
        cluster.root(node, "cp", CONFIG, f"{CONFIG}.before")
        cluster.root(node, "sh", "-c", f"cat >> {CONFIG}", stdin=LIMITS.encode())
    user = f"user {slurm.USER} account=chem qos=normal,gold defaultaccount=chem"
    for words in ("qos gold", "account chem", user):
        cluster.root("head", "sacctmgr", "-i", "add", *words.split())
    yield cluster
    for node in slurm.NODES:
        cluster.root(node, "mv", f"{CONFIG}.before", CONFIG)


def used(cluster, job_id, nodes):
    """Return sacct's output of a job's guests for its user, after all nodes have reported."""
    fields = ("-X", "-n", "-P", "--format=JobID,Account,QOS,AdminComment")

    def told():
        rows = cluster.user("sacct", "-j", job_id, *fields).stdout.decode().splitlines()
        found = {row.split("|", 1)[0]: row.split("|")[1:] for row in rows}
        each = [sorted(node for node, _, _ in USED.findall(row[2])) for row in found.values()]
        return found if all(there == nodes for there in each) else None

    return cluster.wait(told, what="a note of each node")


VM = "--vm=ram=256M"
BATCH = {
    "vsub": (("vsub",), SCRIPT),
    "sbatch": (("sbatch", VM), SCRIPT),
    "directive": (("sbatch",), SCRIPT.replace("\n", f"\n#SBATCH {VM}\n", 1)),
}
LIVE = {"srun": (("srun", VM), ()), "salloc": (("salloc", VM), ("srun",))}


@pytest.mark.parametrize("spelling", [*BATCH, *LIVE])
def test_sacct_shows_guest_usage_of_each_node(accounting_cluster, clean, spelling):
    """The comment has one entry per node; account and QOS are unchanged."""
    share = ("-Cvtorque", "-N2", "-wn1,n2", "--qos=gold", "-Achem")
    if spelling in BATCH:
        command, content = BATCH[spelling]
        clean.user(*command, "-W", "-oout", *share, clean.script(content))
        rows = clean.read("out").splitlines()
    else:
        command, tail = LIVE[spelling]
        done = clean.user(*command, *share, *tail, f"./{clean.script(SCRIPT)}")
        rows = done.stdout.splitlines()
    ((job_id, *words),) = {tuple(row.decode().split()) for row in rows}
    assert words == ["chem", "gold"]
    account, qos, comment = used(clean, job_id, ["n1", "n2"])[job_id]
    assert (account, qos) == ("chem", "gold")
    assert comment.count("vtorque") == 2
    assert all(int(mib) > 100 for _, _, mib in USED.findall(comment)), "the memory is not QEMU's"


@pytest.mark.parametrize(("command", "content"), BATCH.values(), ids=BATCH)
def test_usage_is_recorded_for_each_array_task(accounting_cluster, clean, command, content):
    done = clean.user(
        *command, "-Cvtorque", "-W", "--parsable", "-a1-2", "-wn1", "-c2", "-o/dev/null",
        clean.script(content),
    )  # fmt: skip
    job_id = done.stdout.decode().strip()
    found = used(clean, job_id, ["n1"])
    assert found.keys() == {f"{job_id}_1", f"{job_id}_2"}
    assert {tuple(row[:2]) for row in found.values()} == {("chem", "normal")}


@pytest.mark.parametrize(("qos", "said"), [("gold", b"[[limits]] 1 (qos = "), ("normal", b"")])
def test_limit_for_a_qos_applies_to_its_jobs_only(accounting_cluster, clean, qos, said):
    """The spelling of slurmdbd, whatever the user's variables contain."""
    done = clean.user(
        "vsub", "-W", "-c2", f"--qos={qos}", "-oout", "-vm", "vcpus=2", clean.script(SCRIPT),
        check=False, env={"SLURM_JOB_QOS": "normal"}.items(),
    )  # fmt: skip
    assert done.returncode == (121 if said else 0)
    assert said in clean.read("out")
