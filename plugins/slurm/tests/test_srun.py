"""srun inside guests: with real shells, and a double of ssh that runs programs here."""

import itertools
import os
import shutil
import socket
import subprocess
import sys
from importlib.resources import files

import pytest

import sparing
from vtorque_slurm import hostlist, inside_guests

HERE = socket.gethostname()
SHELLS = [["busybox", "sh"], ["dash"], ["bash", "--posix"]]  # the first is micro's


@pytest.fixture(params=sparing.each(3, SHELLS), ids=lambda shell: shell[0])
def srun(request, tmp_path):
    """Return a function that runs srun in a guest of two; the other is reached by ssh."""
    if shutil.which(request.param[0]) is None:
        pytest.fail(f"{request.param[0]}: not installed")
    (tmp_path / "scontrol").write_bytes(inside_guests.program("scontrol"))
    (tmp_path / "scontrol").chmod(0o755)
    program = tmp_path / "srun"
    program.write_bytes(inside_guests.program("srun"))
    guests = tmp_path / "guests"
    guests.write_text(f"{HERE} 2 0\nvn2 2 0\nn3 4 1\nn4 4 1\n{HERE} 100 2\n")
    ssh = tmp_path / "ssh"
    there = " ".join(request.param)  # the other guest has the same image
    ssh.write_text(
        '#!/bin/sh\n[ "$8 $9" = "exec /bin/sh" ] || exit 99\n'
        f'via=$7\nshift 9\nexec env -i PATH=/usr/bin:/bin VIA=ssh ON=$via {there} "$@"\n'
    )
    ssh.chmod(0o755)
    on_guest = tmp_path / "on-guest"
    on_guest.write_bytes(files("vtorque_linux_guest.guest").joinpath("on-guest").read_bytes())
    on_guest.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "VTORQUE_SLURM_GUESTS": str(guests),
        "VTORQUE_ON_GUEST": str(on_guest),
    }  # fmt: skip

    def call(*args, stdin="", umask=0o022, **more):
        argv = [*request.param, str(program), *args]
        return subprocess.run(
            argv, env=environ | more, input=stdin, capture_output=True, text=True, check=False,
            cwd=tmp_path, timeout=120, umask=umask,
        )  # fmt: skip

    return call


SHOW = ("sh", "-c", "echo $SLURM_PROCID/$SLURM_NTASKS $SLURM_LOCALID $SLURM_NODEID ${VIA:-here}")


@pytest.mark.parametrize(
    ("args", "environ", "tasks"),
    [
        ([], {}, ["0/2 0 0 here", "1/2 0 1 ssh"]),
        (["-n1"], {}, ["0/1 0 0 here"]),
        (["-N1", "-n2"], {}, ["0/2 0 0 here", "1/2 1 0 here"]),
        (["-n", "3"], {}, ["0/3 0 0 here", "1/3 1 0 here", "2/3 0 1 ssh"]),
        (["--ntasks-per-node=2"], {},
         ["0/4 0 0 here", "1/4 1 0 here", "2/4 0 1 ssh", "3/4 1 1 ssh"]),
        (["-c2", "--nodes", "2"], {}, ["0/2 0 0 here", "1/2 0 1 ssh"]),
        ([], {"SLURM_NTASKS": "1"}, ["0/1 0 0 here"]),
        (["--het-group=1"], {"SLURM_NTASKS_HET_GROUP_1": "3"},
         ["0/3 0 0 ssh", "1/3 1 0 ssh", "2/3 0 1 ssh"]),
        (["--het-group=0,1"], {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2"},
         ["0/5 0 0 here", "1/5 0 1 ssh", "2/5 1 1 ssh", "3/5 0 2 ssh", "4/5 1 2 ssh"]),
        (["-N1"], {"SLURM_NTASKS_PER_NODE": "2"}, ["0/2 0 0 here", "1/2 1 0 here"]),
        (["--nodes=1", "--ntasks=1", "-w", "vn2"], {}, ["0/1 0 0 ssh"]),
        (["--nodelist=vn2", "-n2"], {}, ["0/2 0 0 ssh", "1/2 1 0 ssh"]),
        ([f"-wvn2,{HERE}"], {"SLURM_NTASKS": "1"}, ["0/2 0 0 here", "1/2 0 1 ssh"]),
        (["--nodelist", "vn[2-2]", "--jobid", "7"], {"SLURM_JOB_ID": "7"}, ["0/1 0 0 ssh"]),
    ],
)  # fmt: skip
def test_tasks_run_on_the_expected_guests(srun, args, environ, tasks):
    done = srun(*args, *SHOW, **environ)
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, tasks, "")


def test_srun_with_many_short_labelled_tasks_labels_every_line(srun):
    """A task that ended while srun opened another task's FIFO of labels ended busybox's srun."""
    done = srun("-l", "-n100", "--het-group=2", "sh", "-c", "echo a")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(f"{task}: a" for task in range(100))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mpi=pmix", "true"], "--mpi=pmix does not work inside"),
        (["-n"], "-n needs a value"),
        (["-nx", "true"], "-n: 'x' is not a number"),
        (["-n", "0", "true"], "is not a number"),
        ([], "no command"),
        (["-N3", "true"], "3 nodes requested, the job has 2"),
        (["-n5", "true"], "room for 4"),
        (["-n2", "-c3", "true"], "room for 0"),
        (["-w", "n9", "true"], "n9 is no virtual machine of this job"),
        (["-w", "n[", "true"], "write names of hosts with commas"),
        (["-N2", "-w", "vn2", "true"], "2 nodes requested, the job has 1"),
        (["--jobid=8", "true"], "--jobid=8: only this job's steps can run here"),
        (["-D", "/nonexistent", "true"], "/nonexistent"),
        (["-m", "cyclic", "true"], "-m=cyclic does not work inside"),
    ],
)
def test_unsupported_use_fails_with_a_message(srun, args, message):
    done = srun(*args)
    assert done.returncode == 1
    assert "error: " in done.stderr or "/nonexistent" in done.stderr
    assert message in done.stderr


IGNORED = (
    "--unbuffered", "-u", "-K", "-K1", "--kill-on-bad-exit=1", "--mpi=none", "--cpu-bind=none",
    "--cpu-bind", "cores", "--exclusive", "--exclusive=user", "--mem=0", "--mem", "1G", "--overlap",
    "--exact", "--export=ALL", "-Q", "--wait=60", "-W", "60", "--job-name=x", "-J", "y", "-k", "-s",
    "-m", "block:block", "--distribution=block", "--hint=nomultithread", "--threads-per-core=1",
    "-v",
)  # fmt: skip


def test_ignored_options_are_accepted(srun):
    """The options that submitit and launchers of PyTorch pass."""
    done = srun(*IGNORED, "-N2", *SHOW)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["0/2 0 0 here", "1/2 0 1 ssh"]


def test_chdir_is_the_directory_of_all_tasks(srun, tmp_path):
    (tmp_path / "there").mkdir()
    done = srun("-N2", "-D", "there", "pwd")
    assert (done.stdout, done.stderr) == (f"{tmp_path}/there\n" * 2, "")


def test_labels_name_the_task_of_each_line(srun, tmp_path):
    done = srun("-l", "-N2", "sh", "-c", "echo a; echo b; printf c; echo d >&2; exit 3")
    assert done.returncode == 3
    lines = ["0: a", "0: b", "0: c", "1: a", "1: b", "1: c"]
    assert sorted(done.stdout.splitlines()) == lines
    assert {"0: d", "1: d"} < {*done.stderr.splitlines()}


@pytest.mark.parametrize(
    ("args", "files"),
    [
        (["-o", "%j_%t.out"], {"42_0.out": "0o\n0e\n", "42_1.out": "1o\n1e\n"}),
        (["--output=%n.o", "--error", "%J.%s.%t%%"],
         {"0.o": "0o\n", "1.o": "1o\n", "42.0.0.0%": "0e\n", "42.0.0.1%": "1e\n"}),
        (["-n1", "-oall.log"], {"all.log": "0o\n0e\n"}),
        (["-n1", "-o", "none", "-e", f"{HERE}.%N"], {f"{HERE}.{HERE}": "0e\n"}),
        (["-n1", "-l", "-o", "l"], {"l": "0: 0e\n0: 0o\n"}),
    ],
)  # fmt: skip
def test_outputs_are_written_to_files_by_pattern(srun, tmp_path, args, files):
    for name in files:
        (tmp_path / name).write_text("of before\n")
    show = 'echo "${SLURM_PROCID}o"; echo "${SLURM_PROCID}e" >&2'
    done = srun(*args, "sh", "-c", show, SLURM_JOB_ID="42")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = {name: (tmp_path / name).read_text() for name in files}
    if "-l" in args:  # two streams in no fixed order
        found = {name: "".join(sorted(text.splitlines(True))) for name, text in found.items()}
    assert found == files


def test_tasks_share_a_file_and_an_unknown_pattern_is_named(srun, tmp_path):
    srun("-N2", "-o", "both", "sh", "-c", "echo $SLURM_PROCID", SLURM_JOB_ID="42")
    assert sorted((tmp_path / "both").read_text().split()) == ["0", "1"]
    done = srun("-o", "%q", "true")
    assert done.returncode == 1 and "%q: %j %J %t" in done.stderr


@pytest.mark.parametrize("shell", sparing.each(3, SHELLS))
@pytest.mark.parametrize(
    ("kind", "given", "printed"),
    [
        ("hostnames", "n[1-3,7],m", "n1 n2 n3 n7 m"),
        ("hostnames", "a[08-10]b[1-2]", "a08b1 a08b2 a09b1 a09b2 a10b1 a10b2"),
        ("hostlist", "n1,n2,n4,m,n08,n09,n10", "n[1-2,4],m,n[08-10]"),
        ("hostlist", "n9,n10", "n[9-10]"),
        ("hostlist", "a,b", "a,b"),
        ("hostlistsorted", "n3,n1,n2,n1", "n[1-3]"),
    ],
)
def test_scontrol_shows_lists_of_hosts(tmp_path, shell, kind, given, printed):
    path = tmp_path / "scontrol"
    path.write_bytes(inside_guests.program("scontrol"))
    argv = [*shell, str(path), "show", kind]
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_NODELIST": given}
    done = subprocess.run([*argv, given], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == printed.split()
    if kind == "hostnames":
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.split() == list(hostlist.expand(given)), "not the nodes of the job"


@pytest.mark.parametrize(
    "words", [["show", "hostnames", "n[1-"], ["show", "hostnames", ""], ["show", "job", "1"], []]
)
def test_unsupported_scontrol_command_fails_with_a_message(tmp_path, words):
    path = tmp_path / "scontrol"
    path.write_bytes(inside_guests.program("scontrol"))
    done = subprocess.run(["sh", path, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("scontrol: error: ")


def test_arguments_and_variables_reach_the_other_guest_unchanged(srun, tmp_path):
    odd = ["a  b", "'q'", '"', "$HOME", "new\nline", "", "\\", "*", "é"]
    srun("-N2", "sh", "-c", 'printf "%s." "$@" "$MINE" > $SLURM_PROCID', "sh", *odd, MINE="x'y\n")
    for rank in "01":
        assert (tmp_path / rank).read_text() == "".join(f"{word}." for word in [*odd, "x'y\n"])


def test_srun_passes_environment_and_umask_to_every_guest(srun, tmp_path):
    """Tasks get all variables unchanged, even if the script has variables of the same names."""
    mine = {
        "TWO": "x\nexport PWD=/\nexport FORGED=1\n", "nodes": "9", "count": "c", "host": "h",
        "tasks": "7", "code": "e", "here": "e", "word": "w", "BYTES": "\udcff\udc81\udc88",
    }  # fmt: skip
    show = "import os, sys; print([os.environ.get(n) for n in sys.argv[1:]], os.umask(0))"
    done = srun("-N2", sys.executable, "-c", show, *mine, **mine, umask=0o027)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{list(mine.values())} {0o027}"] * 2


def test_exit_codes_and_standard_input(srun):
    done = srun(
        "-n3", "sh", "-c", "echo $SLURM_PROCID:$(cat); exit $((SLURM_PROCID * 3))", stdin="in"
    )
    assert done.returncode == 6
    assert sorted(done.stdout.splitlines()) == ["0:in", "1:", "2:"]
    assert f"srun: error: {HERE}: task 1: Exited with exit code 3" in done.stderr
    assert "srun: error: vn2: task 2: Exited with exit code 6" in done.stderr


def test_signal_ends_the_tasks(srun, tmp_path):
    text = f"echo $$ >> {tmp_path}/pids; exec sleep 60"
    script = f"{{ srun -N1 -n2 sh -c '{text}'; }} & sleep 1; kill $!; wait $!; echo $?"
    program = tmp_path / "srun"
    program.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", script.replace("{ srun", "exec srun").replace("; }", "")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "VTORQUE_SLURM_GUESTS": str(tmp_path / "guests")},
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.stdout.strip() == "143"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_other_commands_fail_with_a_message(tmp_path):
    path = tmp_path / "sbatch"
    path.write_bytes(inside_guests.program("refuse"))
    done = subprocess.run(["sh", path, "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("sbatch: error: does not work inside")


def test_every_count_fits_or_is_refused(srun):
    """No task is lost: as many run as were requested."""
    for tasks, nodes in itertools.product((1, 2, 3, 4), (1, 2)):
        done = srun(f"-n{tasks}", f"-N{nodes}", "echo", "x")
        assert done.stdout.count("x") == (tasks if tasks <= 2 * nodes else 0)
