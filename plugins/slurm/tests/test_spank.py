"""The SPANK plugin's build and installation, and the requests and tasks that it passes."""

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_doubles import SlurmDoubles
from vtorque_admin.steps import Check
from vtorque_core.api import HostFault, UsageError
from vtorque_core.api.batch_system import Needs, Outcome
from vtorque_core.api.setup_steps import Installation
from vtorque_slurm import controller_updates, plugin, step_tasks
from vtorque_slurm.batch_commands import SlurmClient
from vtorque_slurm.node import SlurmNode
from vtorque_slurm.settings import Settings
from vtorque_slurm.shell import SlurmJobShell
from vtorque_slurm.spank import build, installation
from vtorque_slurm.submitter import SlurmSubmitter, merge_vm

BUILT = b"\x7fELF vtorque-spank for Slurm 0x160508\0"
SITES = b"required /usr/lib/site.so a=1\n# the last line has no end"


# -- build and installation -----------------------------------------------------------------------


def test_build_gives_same_bytes_and_release_of_headers():
    text = Path("/usr/include/slurm/slurm_version.h").read_text()
    number = int(text.split("#define SLURM_VERSION_NUMBER ")[1].split()[0], 16)
    found = build.build()
    assert build.release(found) == f"{number >> 16}.{number >> 8 & 255:02}"
    assert found == build.build()
    assert len(build.SOURCE.read_text().splitlines()) <= 400


def test_build_without_compiler_or_headers_says_what_to_install(tmp_path, monkeypatch):
    with pytest.raises(HostFault, match="install gcc"):
        build.build("no-such-compiler")
    source = tmp_path / "plugin.c"
    source.write_text("#include <slurm/no_such_header.h>\n")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(HostFault, match="install libslurm-dev"):
        build.build()
    source.write_text("int a = ;\n")
    with pytest.raises(HostFault, match="could not compile"):
        build.build()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a function that gives the setup steps of a node whose site has this plugstack.conf."""
    monkeypatch.setattr(build, "build", lambda: BUILT)

    def steps_with(stack=None, conf="", **settings):
        (tmp_path / "slurm.conf").write_text(conf)
        if stack is not None:
            (tmp_path / "plugstack.conf").write_bytes(stack)
        where = Installation(tmp_path / "bin/vtorque", tmp_path / "v.toml", tmp_path / "shell")
        given = Settings(conf=str(tmp_path / "slurm.conf"), **{"spank": True, **settings})
        return list(installation.steps(given, where, tmp_path / "proof"))

    return steps_with


@pytest.mark.parametrize("before", [None, b"", SITES, b"include other.d/*.conf\n"])
def test_uninstall_restores_plugstack_byte_for_byte(place, tmp_path, before):
    stack = tmp_path / "plugstack.conf"
    for _ in range(2):
        for step in place(before if not stack.exists() else None):
            if not step.is_applied():
                step.apply()
    *mark, line, rest = stack.read_bytes().split(b"\n", 2 if before is None else 1)
    assert line.decode().split() == [
        "optional", str(tmp_path / installation.NAME), f"jobshell={tmp_path}/shell",
        f"proofs={tmp_path}/proof", f"vsub={tmp_path}/bin/vsub",
    ]  # fmt: skip
    assert (rest, bool(mark)) == (before or b"", before is None)
    assert (tmp_path / installation.NAME).read_bytes().startswith(BUILT)
    for step in reversed(place()):
        if not isinstance(step, Check):
            step.undo()
    assert (stack.read_bytes() if stack.exists() else None) == before
    assert not (tmp_path / installation.NAME).exists()


def test_uninstall_works_without_compiler(place, tmp_path, monkeypatch):
    for step in place(SITES)[1:]:
        step.apply()

    def fail():
        raise HostFault("no compiler")

    monkeypatch.setattr(build, "build", fail)
    steps = place()
    assert [step.problem for step in steps if isinstance(step, Check)] == ["no compiler"]
    for step in reversed(steps):
        step.undo()
    assert (tmp_path / "plugstack.conf").read_bytes() == SITES


def test_setup_without_spank_has_no_steps(place):
    assert place(spank=False) == []


def test_plugstack_of_slurm_conf_is_used(place, tmp_path):
    (_, _, line) = place(conf=f"PlugStackConfig={tmp_path}/elsewhere\n")
    line.apply()
    assert (tmp_path / "elsewhere").exists()
    line.undo()
    assert not (tmp_path / "elsewhere").exists()


# -- what Slurm on a node loads -------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr("vtorque_slurm.batch_commands._PAUSE", 0.0)
    found = SlurmDoubles(tmp_path)
    (found.bin / "slurmd").write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
    (found.bin / "slurmd").chmod(0o755)
    (tmp_path / "slurm.conf").touch()
    return found


@pytest.fixture
def settings(slurm, tmp_path):
    return Settings(bindir=str(slurm.bin), conf=str(tmp_path / "slurm.conf"), spank=True)


@pytest.mark.parametrize("stack", ["optional {}\n", "required {} a=1\n", "include more.d/*.conf\n"])
def test_plugin_in_plugstack_is_found(settings, tmp_path, stack):
    path = tmp_path / installation.NAME
    path.write_bytes(BUILT)
    (tmp_path / "plugstack.conf").write_text(f"# a comment\n{stack.format(path)}")
    (tmp_path / "more.d").mkdir()
    (tmp_path / "more.d/a.conf").write_text(f"optional {path}\n")
    assert installation.problem(settings, SlurmClient(settings)) == ""


@pytest.mark.parametrize(
    ("stack", "content", "said"),
    [
        (None, BUILT, "does not load"),
        ("#optional {}\n", BUILT, "does not load"),
        ("optional {}\n", None, "No such file"),
        ("optional {}\n", BUILT.replace(b"0x160508", b"0x180b05"), "built for Slurm 24.11, and"),
        ("optional {}\n", b"", "built for Slurm ?, and Slurm 22.05.8 runs here"),
    ],
)
def test_plugin_that_slurm_would_skip_is_a_problem(settings, tmp_path, stack, content, said):
    path = tmp_path / installation.NAME
    if content is not None:
        path.write_bytes(content)
    if stack is not None:
        (tmp_path / "plugstack.conf").write_text(stack.format(path))
    assert said in installation.problem(settings, SlurmClient(settings))


def test_doctor_reports_a_missing_plugin(settings, tmp_path, monkeypatch):
    batch = SimpleNamespace(name="slurm")
    monkeypatch.setattr(installation.service, "batch_system", lambda _: (None, batch))
    check = plugin.vtorque_health_checks()[-1].check

    def look(given):
        class Of(SimpleNamespace):
            def __getitem__(self, _):
                return given

        return list(check(Of(path=None)))

    found, _ = look(settings)
    assert found.status == "failed"
    assert "jobs with --vm= are refused on this node" in found.message
    (tmp_path / installation.NAME).write_bytes(BUILT)
    (tmp_path / "plugstack.conf").write_text(f"optional {tmp_path / installation.NAME}\n")
    found, feature = look(settings)
    assert (found.status, feature.status) == ("ok", "warning")
    assert "feature is not set, so --vm= jobs can start on any node: without" in feature.message
    assert look(Settings(conf=settings.conf)) == []


def test_doctor_names_nodes_without_the_feature(slurm, settings, tmp_path):
    def found():
        return installation._unmarked_nodes(replace(settings, feature="vm"), SlurmClient(settings))

    slurm.node(features={"n1": "a,vm", "n2": "(null)", "n3": "vmx"})
    assert found() == "nodes without the feature vm: n2, n3"
    slurm.node(features={"n1": "a,vm"})
    assert found() == ""
    slurm.node(features={f"n{number}": "a" for number in range(12)})
    assert found().endswith("n5, ...")
    (tmp_path / "slurm.conf").write_text("CliFilterPlugins=a,lua\n")
    assert found()
    (tmp_path / "cli_filter.lua").write_text("-- vtorque\n")
    assert found() == ""


# -- Prolog ---------------------------------------------------------------------------------------


def prolog(**more):
    return {
        "SLURM_JOB_ID": "7", "SLURM_JOB_USER": "ada", "SLURM_JOB_UID": str(os.getuid()),
        "SLURMD_NODENAME": "n1", "SLURM_NODELIST": "n1", "SPANK_VTORQUE_REQUEST": "vt1:AAAA",
        **more,
    }  # fmt: skip


@pytest.fixture
def node(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("vtorque_slurm.request_channel.trusted_owner", lambda name, _: name)
    return SlurmNode(settings, tmp_path / "journal", tmp_path / "proof")


def load_plugin(tmp_path):
    (tmp_path / installation.NAME).write_bytes(BUILT)
    (tmp_path / "plugstack.conf").write_text(f"optional {tmp_path / installation.NAME}\n")


def test_prolog_reads_request_from_job_control_environment(node, tmp_path):
    load_plugin(tmp_path)
    job = node.job((), prolog())
    assert (job.blob, job.unknown) == (b"\0\0", "")
    assert node.finish(job, Outcome.READY, "", hook_waits=True) == 0


def test_request_in_comment_has_precedence_and_needs_no_plugin(node):
    job = node.job((), prolog(SLURM_JOB_COMMENT="mine vt1:AGE"))
    assert (job.blob, job.unknown) == (b"a", "")


def test_other_components_of_heterogeneous_job_are_plain(node, tmp_path):
    load_plugin(tmp_path)
    assert node.job((), prolog(SLURM_HET_JOB_ID="6")).blob is None


def test_prolog_fails_if_slurmd_would_start_the_job_on_the_host(node, slurm, monkeypatch):
    left = []
    monkeypatch.setattr(SlurmClient, "start_detached", lambda _, script, *args: left.append(args))
    job = node.job((), prolog())
    assert job.blob is not None
    assert "Slurm does not start the job shell of --vm= jobs" in job.unknown
    assert node.finish(job, Outcome.HOST_FAULT, job.unknown, hook_waits=True) == 1
    assert ["requeue", "7"] in slurm.calls()
    assert left == [("n1", "Reason=Prolog error")]


@pytest.mark.parametrize(
    ("state", "is_undrained"), [("IDLE", True), ("IDLE+DRAIN", False), ("MIXED+DRAIN", False)]
)
def test_node_drained_by_the_site_stays_drained(settings, slurm, monkeypatch, state, is_undrained):
    left = []
    monkeypatch.setattr(SlurmClient, "start_detached", lambda _, script, *args: left.append(args))
    slurm.node(state=state)
    controller_updates.undrain_after_prolog(SlurmClient(settings), "n1")
    assert bool(left) == is_undrained


SCONTROL = """#!/bin/sh
[ "$1" = show ] || { echo "$@" > "$0.updated"; exit; }
echo >> "$0.times"
[ $(wc -l < "$0.times") -lt 3 ] && state=ALLOCATED || state=IDLE+DRAIN
printf "   State=%s ThreadsPerCore=1\n   Reason=Prolog error [root@now]\n" "$state"
"""


def test_reason_of_an_earlier_job_does_not_end_the_wait(tmp_path):
    """Slurm 24.11 keeps it: the node that the second job's Prolog drained stayed drained."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    argv = ["sh", "-c", controller_updates._UNDRAIN, "sh", "n1", controller_updates._PROLOG_ERROR]
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(argv, env=environ, check=True, timeout=60)
    assert (tmp_path / "scontrol.times").read_text() == "\n" * 3
    assert (tmp_path / "scontrol.updated").read_text() == "update NodeName=n1 State=UNDRAIN\n"


# -- submission -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "merged"),
    [
        (["a=1,b=2", "b=3"], "a=1,b=3"),
        (["a=1", "none"], "none"),
        (["none", "a=1"], "a=1"),
        (["none"], "none"),
        ([" a = 1 ,b=2"], "a = 1,b=2"),
    ],
)
def test_later_values_replace_earlier_ones(values, merged):
    assert merge_vm(values) == merged


def test_request_option_prints_only_the_request(tmp_path, capsys):
    submitter = SlurmSubmitter(Settings(), tmp_path)
    args = submitter.split(["--request", "-vm", "a=1", "-vm", "a=2"])
    assert (args.vm, args.script, args.content) == (("a=2",), None, None)
    for mib, shown in ((556, 556), (None, 0)):
        assert submitter.submit(args, b"{}", Needs(2, mib)) == 0
        assert capsys.readouterr().out == f"vt1:AHt9 2 {shown}\n"
    assert submitter.submit(args, None, None) == 0
    assert capsys.readouterr().out == ""


# -- tasks ----------------------------------------------------------------------------------------


def environ(**more):
    return {"SLURM_JOB_ID": "7", "VTORQUE_TASK_PROGRAM": "/spool/slurm_script", **more}


def test_batch_script_of_sbatch_is_passed_unchanged():
    shell = SlurmJobShell()
    started = shell.read_start(["a", "b"], environ(VTORQUE_TASK="batch"), None)
    assert (started.script, started.args) == (Path("/spool/slurm_script"), ("a", "b"))
    assert shell.content(b"#!/bin/sh\nexit\n") == b"#!/bin/sh\nexit\n"
    assert SlurmJobShell().content(b"#!/job/shell\n#!/bin/sh\n") == b"#!/bin/sh\n"


def test_task_of_a_step_is_a_command(tmp_path):
    started = SlurmJobShell().read_start(["it's", ""], environ(VTORQUE_TASK="step"), None)
    assert started.script is None
    assert started.command == "#!/bin/sh\nexec /spool/slurm_script 'it'\"'\"'s' ''\n"
    with pytest.raises(UsageError, match="only Slurm can start"):
        SlurmJobShell().read_start([], {"VTORQUE_TASK_PROGRAM": "x"}, None)


@pytest.mark.parametrize("name", ["PMI_FD", "PMIX_NAMESPACE"])
def test_step_with_mpi_plugin_is_refused_with_mpirun(name):
    """Otherwise each task would be a separate MPI program."""
    start, mpi = SlurmJobShell().read_start, {name: "9", "VTORQUE_TASK": "step"}
    with pytest.raises(UsageError, match=r"Start MPI programs with mpirun .* srun --mpi=none"):
        start([], environ(SLURM_STEP_NUM_TASKS="2", **mpi), None)
    assert start([], environ(SLURM_STEP_NUM_TASKS="1", **mpi), None).command
    assert name in SlurmJobShell.host_only


def run(words, ids, stdin=b"", **more):
    text = step_tasks.command(words, ids)
    return subprocess.run(["sh", "-c", text], input=stdin, capture_output=True, check=False, **more)


def test_several_tasks_have_their_ids_and_the_first_has_standard_input():
    program = 'echo "$SLURM_PROCID $SLURM_LOCALID $1 $(cat)"; exit $((SLURM_PROCID % 4))'
    done = run(["sh", "-c", program, "sh", "a b"], ["4", "5", "7"], b"in")
    assert sorted(done.stdout.splitlines()) == [b"4 0 a b in", b"5 1 a b ", b"7 2 a b "]
    assert done.returncode == 3


@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize("start", ["", "sleep 0.5\n"])
def test_several_tasks_get_signals_and_are_awaited(shell, start):
    """The signal may arrive before the script knows the last task."""
    program = 'trap "echo got; exit 5" USR1; echo ready; for i in $(seq 200); do sleep 0.05; done'
    text = step_tasks.command(["sh", "-c", program], ["0", "1"])
    text = text.replace('pids="$pids', f'{start}pids="$pids')
    with subprocess.Popen([shell, "-c", text], stdout=subprocess.PIPE) as child:
        assert [child.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        child.send_signal(signal.SIGUSR1)
        assert child.stdout.read() == b"got\ngot\n"
        assert child.wait() == 5
