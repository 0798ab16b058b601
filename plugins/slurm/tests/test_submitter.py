"""Golden arguments of sbatch and salloc for each form of submission, and the request."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_doubles import SlurmDoubles
from vtorque_core.api import UsageError
from vtorque_core.api.batch_system import Needs, SubmitArgs
from vtorque_core.api.submission import to_token
from vtorque_slurm import options, request_channel
from vtorque_slurm.settings import Settings
from vtorque_slurm.submitter import SlurmSubmitter

BLOB = b'{"v":1,"vm":[["ram","1G"]],"files":{},"shell":null}'
TOKEN = to_token(BLOB)
NEEDS = Needs(2, 1280, 30)
SHELL = "/usr/libexec/vtorque-jobshell"
SCRIPT = b"#!/bin/sh\necho\n"
PLAIN = [f"--comment={TOKEN}", "--constraint=vt", "--mincpus=2", "--mem=1280M"]


@pytest.fixture
def submitter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("SBATCH_", "SALLOC_", "SLURM_")):
            monkeypatch.delenv(name)
    for name in ("sbatch", "salloc", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return SlurmSubmitter(Settings(feature="vt", bindir=str(tmp_path)), SHELL)


GOLDEN = [
    (["job.sh"], SCRIPT, ["--job-name=job.sh", *PLAIN]),
    (["d/job.sh", "a", "-b"], SCRIPT,
     ["--job-name=job.sh", *PLAIN, "--", "/dev/stdin", "a", "-b"]),
    (["-J", "n", "job.sh"], SCRIPT, ["-J", "n", *PLAIN]),
    ([], SCRIPT, PLAIN),
    (["--wrap=ls"], SCRIPT, ["--job-name=wrap", *PLAIN]),
    (["--wrap", "ls", "-Jx"], SCRIPT, ["-Jx", *PLAIN]),
    (["-c4", "--mem=8G", "-C", "a|b", "--comment=my own", "-t", "1:00", "-Jx", "j"], SCRIPT,
     ["-c4", "--mem=8G", "-C", "a|b", "--comment=my own", "-t", "1:00", "-Jx",
      f"--comment=my own {TOKEN}", "--constraint=(a|b)&vt", "--time=0-00:01:30"]),
    (["-Jx", "-t", "UNLIMITED", "j"], SCRIPT, ["-Jx", "-t", "UNLIMITED", *PLAIN]),
    (["j"], b"#!/bin/sh\n#SBATCH -J s --comment='of script' --mem-per-cpu=1G -t 60 -C a\n",
     [f"--comment=of script {TOKEN}", "--constraint=a&vt", "--mincpus=2", "--time=0-01:00:30"]),
    (["j"], b"#!/bin/sh\n#PBS -N s -l mem=1gb\n", PLAIN[:3]),
    (["--ignore-pbs", "j"], b"#!/bin/sh\n#PBS -N s -l mem=1gb\n",
     ["--ignore-pbs", "--job-name=j", *PLAIN]),
    (["-n4", "-N2", "--parsable", "--wait", "--array=1-9%2", "-d", "afterok:1", "-Jx", "j"], SCRIPT,
     ["-n4", "-N2", "--parsable", "--wait", "--array=1-9%2", "-d", "afterok:1", "-Jx",
      *PLAIN[:2], PLAIN[3]]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "content", "expected"), GOLDEN)
def test_sbatch_gets_user_options_and_additions(submitter, argv, content, expected):
    found, body = submitter.batch(options.split(argv), content, BLOB, NEEDS)
    assert found == ["sbatch", *expected]
    assert body == f"#!{SHELL}\n".encode() + content
    assert request_channel.strip(body) == content


def test_variables_of_the_user_count(submitter, monkeypatch):
    monkeypatch.setenv("SBATCH_JOB_NAME", "env")
    monkeypatch.setenv("SBATCH_CONSTRAINT", "a")
    monkeypatch.setenv("SBATCH_MEM_PER_CPU", "1G")
    found, _ = submitter.batch(options.split(["j"]), SCRIPT, BLOB, NEEDS)
    assert found == ["sbatch", PLAIN[0], "--constraint=a&vt", "--mincpus=2"]


def test_bare_metal_job_is_passed_to_sbatch_unchanged(submitter):
    line = options.split(["-Jx", "--", "job.sh", "a"])
    assert submitter.batch(line, SCRIPT, None, None) == (
        ["sbatch", "-Jx", "--", "job.sh", "a"], None,
    )  # fmt: skip
    line = options.split(["--wrap=ls"])
    assert submitter.batch(line, SCRIPT, None, None) == (["sbatch", "--wrap=ls"], None)
    assert submitter.batch(options.split([]), SCRIPT, None, None) == (["sbatch"], SCRIPT)
    old = b"#!/bin/sh\n#PBS -vm ram=1G\necho\n"  # sbatch parses -v m as its own options
    found = submitter.batch(options.split(["job.sh"]), old, None, None)
    assert found == (["sbatch", "--job-name=job.sh"], SCRIPT)


def test_interactive_job_uses_salloc(submitter, tmp_path):
    line = options.split(["-I", "-N2", "-C", "a"])
    srun = [str(tmp_path / "srun"), "--pty", "--nodes=1", "--ntasks=1", "--relative=0", "--overlap"]
    assert submitter.interactive(line, BLOB, NEEDS) == [
        "salloc", "-N2", "-C", "a", PLAIN[0], "--constraint=a&vt", *PLAIN[2:], "--", *srun, SHELL,
    ]  # fmt: skip
    assert submitter.interactive(line, None, None)[:4] == ["salloc", "-N2", "-C", "a"]
    with pytest.raises(UsageError, match="-I starts a shell and takes no command"):
        submitter.split(["-I", "job.sh"])


@pytest.mark.parametrize(
    ("words", "blob", "found"),
    [
        (["-I"], BLOB, ""),
        (["-I", "--x11"], BLOB, "localhost:10.0"),
        (["-I", "--x11=first"], BLOB, "localhost:10.0"),
        (["-I"], None, "localhost:10.0"),
    ],
)
def test_interactive_vm_job_gets_the_display_only_on_request(
    submitter, tmp_path, words, blob, found
):
    """The job shell passes on its display; salloc's step would have that of the login."""
    (tmp_path / "salloc").write_text(f'#!/bin/sh\necho "display $DISPLAY" >{tmp_path}/seen\n')
    pid = os.fork()
    if pid == 0:
        os.environ["DISPLAY"] = "localhost:10.0"
        submitter.submit(submitter.split(words), blob, NEEDS if blob else None)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "seen").read_text() == f"display {found}\n"


@pytest.mark.parametrize("content", [b"echo\n", b"", b"\n"])
def test_content_that_is_not_a_script_is_passed_unchanged(submitter, content):
    """sbatch refuses it with its own message."""
    assert submitter.batch(options.split(["j"]), content, BLOB, NEEDS)[1] == content


def test_long_request_is_sent_in_the_script(submitter):
    blob = b'{"files":{}}' + os.urandom(2000)
    found, body = submitter.batch(options.split(["-Jx", "--comment=c", "j"]), SCRIPT, blob, NEEDS)
    assert found[3] == "--comment=c vt1:in-script"
    assert request_channel.find_in_script(body) == to_token(blob)
    assert request_channel.strip(body) == SCRIPT
    with pytest.raises(UsageError, match="limit is 1024"):
        submitter.interactive(options.split(["-I"]), blob, NEEDS)
    with pytest.raises(UsageError, match="limit is 1024"):
        submitter.batch(options.split([f"--comment={'x' * 1020}", "j"]), SCRIPT, BLOB, NEEDS)


HET_LINES = b"#!/bin/sh\n#SBATCH -N1 -C vt\n#SBATCH hetjob\n#SBATCH -N4 -t 10 --comment=b\n"
HET = [
    (["-N1", "-C", "vt", ":", "-n8", "-Jx", "j", "a"], SCRIPT,
     ["-N1", "-C", "vt", "--job-name=j", PLAIN[0], PLAIN[2], ":", "-n8", "-Jx", "--comment=",
      "--", "/dev/stdin", "a"]),
    (["-N1", "-C", "a&vt", "--comment=c", ":", "-n8", ":", "-N2", "--wrap", "ls"], SCRIPT,
     ["-N1", "-C", "a&vt", "--comment=c", "--job-name=wrap", f"--comment=c {TOKEN}", PLAIN[2],
      ":", "-n8", "--comment=c", ":", "-N2", "--comment=c"]),
    (["-Jx", "j"], HET_LINES,
     ["-Jx", PLAIN[0], PLAIN[2], ":", "-Jx", "--comment=b", "--time=0-00:10:30"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "content", "expected"), HET)
def test_first_component_of_a_heterogeneous_job_gets_the_guests(submitter, argv, content, expected):
    """Options that sbatch passes from one component to the next are reset, or not requested."""
    found, body = submitter.batch(options.split(argv), content, BLOB, NEEDS)
    assert found == ["sbatch", *expected]
    assert request_channel.strip(body) == content


def test_heterogeneous_bare_metal_job_is_passed_to_sbatch(submitter):
    argv = ["-N1", "-vm", "none", ":", "-n8", "-vm", "none", "j"]
    line = options.split(argv)
    assert line.vm == ("none", "none")
    again = options.split([*line.words, *line.operands])
    assert submitter.batch(again, SCRIPT, None, None) == (
        ["sbatch", "-N1", ":", "-n8", "j"], None,
    )  # fmt: skip


def test_size_is_read_from_the_first_component(submitter, tmp_path):
    (tmp_path / "j").write_bytes(SCRIPT)
    args = submitter.split(["-c4", "--mem=1G", "-C", "vt", ":", "-c16", "-vm", "ram=job", "j"])
    assert (args.vcpus_given, args.mib_given, args.vm) == (4, 1024, ("ram=job",))


@pytest.mark.parametrize(
    ("argv", "content", "feature"),
    [
        (["j"], b"#!/bin/sh\n#SBATCH hetjob\n", "vt"),
        (["-N1", ":", "-C", "vt", "j"], SCRIPT, "vt"),
        (["-C", "vt", ":", "-C", "vt&a", "j"], SCRIPT, "vt"),
        (["-C", "avt", ":", "j"], SCRIPT, "vt"),
        (["-C", "vt", ":", "j"], SCRIPT, ""),
    ],
)
def test_unsupported_heterogeneous_job_is_refused(submitter, argv, content, feature):
    submitter = SlurmSubmitter(replace(submitter._settings, feature=feature), SHELL)
    with pytest.raises(UsageError, match="heterogeneous"):
        submitter.batch(options.split(argv), content, BLOB, NEEDS)
    assert submitter.batch(options.split(argv), content, None, None)[1] is None


def test_split_reads_the_script(submitter, tmp_path, monkeypatch):
    (tmp_path / "job.sh").write_bytes(b"#!/bin/sh\n#SBATCH -c3 --mem=1G\n#VSUB -vm ram=1G\n")
    args = submitter.split(["-vm", "img=x", "job.sh", "a"])
    assert isinstance(args, SubmitArgs)
    assert (args.vm, args.rest, args.directives) == (("img=x",), ("job.sh", "a"), ("ram=1G",))
    assert (args.script, args.vcpus_given, args.mib_given) == ("job.sh", 3, 1024)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir("/")
    (tmp_path / "job.sh").chmod(0o755)
    assert submitter.split(["job.sh"]).vcpus_given == 3, (
        "the script was not found in PATH, where sbatch also searches"
    )
    assert submitter.split(["--version"]).content is None


def test_partition_account_and_qos_are_read_in_order(submitter, tmp_path, monkeypatch):
    """Command line, environment, script, in this order; of several partitions Slurm chooses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_bytes(b"#!/bin/sh\n#SBATCH -p slow -A Chem\n#SBATCH --qos=low\n")
    assert submitter.split(["job.sh"]).facts == {
        "partition": "slow", "account": "chem", "qos": "low"
    }  # fmt: skip
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    monkeypatch.setenv("SALLOC_QOS", "high")
    found = submitter.split(["-Aown", "job.sh"]).facts
    assert found == {"partition": "gpu", "account": "own", "qos": "low"}
    assert "partition" not in submitter.split(["-pgpu,slow", "job.sh"]).facts
    assert submitter.split(["-I"]).facts == {"qos": "high"}


def test_files_of_a_user_are_not_in_the_public_comment(submitter):
    blob = b'{"files":{"vm_prologue":["p","eA=="]}}'
    found, body = submitter.batch(options.split(["-Jx", "j"]), SCRIPT, blob, NEEDS)
    assert "--comment=vt1:in-script" in found
    assert request_channel.find_in_script(body) == to_token(blob)
    with pytest.raises(UsageError, match="all users can read"):
        submitter.interactive(options.split(["-I"]), blob, NEEDS)


@pytest.mark.parametrize("name", ["x\n5|5|root|R|1:00|n9|forged", "a|b", "", "\n"])
def test_job_name_is_not_read_as_another_row(tmp_path, name):
    slurm = SlurmDoubles(tmp_path)
    (slurm.top / "7.job").touch()
    (slurm.top / "name").write_text(name)
    rows = list(SlurmSubmitter(Settings(bindir=str(slurm.bin)), Path("/shell")).jobs())
    assert [(r.id, r.owner, r.state, r.node) for r in rows] == [
        ("7", "ada", "R", "n[1-2]"), ("100007", "ada", "R", "n[1-2]"),
    ]  # fmt: skip
    assert {(r.nodes, r.reason) for r in rows} == {(("n1", "n2"), "")}
    assert all(row.name.isprintable() for row in rows)


def test_command_runs_as_a_step_of_a_running_job(tmp_path):
    """On that node, beside all others, regardless of step variables in the caller's environment."""
    slurm = SlurmDoubles(tmp_path)
    step = SlurmSubmitter(Settings(bindir=str(slurm.bin)), Path("/shell")).step
    argv = step("7", "n2", ["vmgr", "logs"], terminal=False)
    assert argv[:6] == [
        f"{slurm.bin}/srun", "--jobid=7", "--nodelist=n2", "--nodes=1", "--ntasks=1", "--overlap",
    ]  # fmt: skip
    assert "--pty" not in argv and argv[-2:] == ["vmgr", "logs"]
    assert "--pty" in step("7", "n2", ["vmgr", "ssh"], terminal=True)
    assert not [word for word in argv if "group" in word]  # srun refuses it of a plain job
    (slurm.bin / "squeue").write_text("#!/bin/sh\necho 7+0; echo 7+1\n")
    assert "--het-group=0" in step("7", "n2", ["vmgr", "logs"], terminal=False)
