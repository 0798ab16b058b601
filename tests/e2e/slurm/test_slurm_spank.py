"""``--vm=`` of Slurm's own commands, on a real Slurm with real guests: the SPANK plugin."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

import slurm_cluster as slurm
import sparing

pytestmark = pytest.mark.e2e

PLUGIN, STACK = "/usr/libexec/vtorque-spank.so", "/etc/slurm/plugstack.conf"
SHARE = ("-N1", "-n1", "-c1", "--mem=600M")
VM = "--vm=ram=300M"
BODY = """
echo "in $(hostname) $(id -un) $PWD $(awk '/MemTotal/ { print int($2 / 102400) }' /proc/meminfo)"
echo "args $# <$1> <$2>"
echo "slurm $SLURM_NNODES $SLURM_JOB_CPUS_PER_NODE $SLURM_JOB_NAME $MINE"
env | sed 's/=.*//' | sort | xargs echo names
echo err >&2
exit 7
"""
# Variables of srun's tasks and of batch scripts only: srun(1), sbatch(1), OUTPUT ENVIRONMENT.
OF_ONE = re.compile(
    r"SLURM_(PROCID|LOCALID|NODEID|GTIDS|DISTRIBUTION|STEP.*|SRUN.*|LAUNCH.*|GET_USER_ENV|TASK.*|"
    r"NTASKS.*|NPROCS|UMASK|CPUS_PER_TASK|MEM_PER_.*|EXPORT_ENV|PRIO_PROCESS|SUBMIT_.*|CPU_BIND.*)|"
    r"SRUN_.*|ENVIRONMENT|SALLOC_.*|SLURM_.*_PACK_GROUP_0|SLURM_JOB_GROUP"
)


def ended(cluster, *argv, **more):
    """Run a command as the user; return exit status, standard output and error."""
    done = cluster.user(*argv, check=False, **more)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_five_spellings_give_the_same_job(clean):
    """The exit status, streams, arguments, share and environment are those of vsub's job."""
    script = clean.script(f"#!/bin/sh{BODY}")
    directive = clean.script(f"#!/bin/sh\n#SBATCH {VM}{BODY}", "directive.sh")
    env = {"MINE": "a b"}.items()
    batch = ("-W", "-J", "same", *SHARE)
    live = ("-J", "same", *SHARE)
    commands = {
        "vsub": ("vsub", *batch, "-vm", "ram=300M", "-ovsub.out", "-evsub.err", script),
        "sbatch": ("sbatch", *batch, VM, "-osbatch.out", "-esbatch.err", script),
        "directive": ("sbatch", *batch, "-odirective.out", "-edirective.err", directive),
        "srun": ("srun", *live, VM, f"./{script}"),
        "salloc": ("salloc", *live, VM, "srun", f"./{script}"),
    }

    def run(name):
        code, out, err = ended(clean, *commands[name], "one  word", "two", env=env)
        if name not in ("srun", "salloc"):
            out, err = (clean.read(f"{name}.{kind}").decode() for kind in ("out", "err"))
        return code, out.splitlines(), err

    with ThreadPoolExecutor(len(commands)) as pool:
        found = dict(zip(commands, pool.map(run, commands), strict=True))
    code, wanted, err = found["vsub"]
    assert (code, err) == (7, "err\n")
    assert re.fullmatch(rf"in vn\d {slurm.USER} /home/{slurm.USER} 2", wanted[0])
    assert wanted[1:3] == ["args 2 <one  word> <two>", "slurm 1 1 same a b"]
    names = set(wanted[3].split())
    for name, (code, out, err) in found.items():
        assert code == 7, (name, out, err)
        assert out[1:3] == wanted[1:3], (name, err)
        assert re.fullmatch(r"in vn\d \S+ \S+ 2", out[0]), name
        assert "err\n" in err, name
        others = set(out[3].split()) ^ names
        if name not in ("srun", "salloc"):
            assert err == "err\n", name
        else:
            others = {each for each in others if not OF_ONE.fullmatch(each)}
        assert others == set(), name


def test_srun_passes_input_output_and_signals(clean):
    """The program reads srun's input, and gets scancel's signal."""
    program = (
        'trap "echo got; exit 5" USR1; cat; echo "in $(hostname)" >&2; echo ready;'
        " while :; do sleep 0.1; done"
    )
    argv = clean.user_command("srun", *SHARE, VM, "-J", "input", "sh", "-c", program)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes) as srun:
        srun.stdin.write(b"one \0\377\ntwo")
        srun.stdin.close()
        assert srun.stdout.read(len(b"one \0\377\ntwoready\n")) == b"one \0\377\ntwoready\n"
        (job_id,) = clean.user("squeue", "-h", "-n", "input", "-o", "%i").stdout.decode().split()
        clean.user("scancel", "-s", "USR1", f"{job_id}.0")
        assert srun.stdout.read() == b"got\n"
        # Slurm 24.11 says so while Prolog waits for a guest on a slow machine.
        err = srun.stderr.read().removeprefix(b"srun: Prolog hung on node n1\n")
        assert srun.wait() == 5
    assert re.match(rb"in vn\d\n", err)
    assert re.search(rb"task 0: Exited with exit code 5", err)


def test_salloc_of_heterogeneous_job_has_guests_in_the_first_component(clean):
    """Tasks of the other components run on their nodes, as those of batch jobs do."""
    program = 'echo "$SLURM_PROCID $(hostname)"; exit $SLURM_PROCID'
    tasks = ("srun", "--het-group=0,1", "sh", "-c", program)
    code, out, err = ended(clean, "salloc", "-wn1", *SHARE, VM, ":", "-wn2", "-n2", *tasks)
    assert sorted(out.splitlines()) == ["0 vn1", "1 n2", "2 n2"], err
    assert code == 2


@pytest.mark.full
def test_several_tasks_run_in_the_guests_of_two_nodes(clean):
    program = 'echo "$SLURM_PROCID $SLURM_LOCALID $(hostname) $(cat)"; exit $SLURM_PROCID'
    share = ("-N2", "-n4", "--ntasks-per-node=2", "--mem=600M", "-wn1,n2")
    code, out, err = ended(clean, "srun", *share, VM, "sh", "-c", program, stdin=b"x")
    rows = sorted(out.splitlines())
    assert [row.split()[:3] for row in rows] == [
        ["0", "0", "vn1"], ["1", "1", "vn1"], ["2", "0", "vn2"], ["3", "1", "vn2"],
    ], err  # fmt: skip
    assert code == 3
    code, out, err = ended(clean, "srun", *SHARE, VM, "--multi-prog", clean.script("0 /bin/true\n"))
    assert code == 120
    assert "--multi-prog does not work with virtual machines; nothing was run" in err
    code, out, err = ended(clean, "srun", *share, VM, "--mpi=pmi2", "hostname")
    assert (code, out) == (2, "")
    assert "Start MPI programs with mpirun in the job's script" in err


def test_variables_and_none(clean):
    """SBATCH_VM and SLURM_VM are defaults. vsub validates values at submission."""
    host = clean.user("uname", "-r").stdout
    env = {"SBATCH_VM": "ram=300M", "SLURM_VM": "ram=300M"}.items()
    clean.user("sbatch", "-W", "--vm=none", "-oout", clean.script("#!/bin/sh\nuname -r\n"), env=env)
    assert clean.read("out") == host
    assert clean.user("srun", "--vm=none", "uname", "-r", env=env).stdout == host
    for command in (["sbatch", "--wrap=true"], ["srun", "true"], ["salloc", "true"]):
        name, *rest = command
        code, _, err = ended(clean, name, "--vm=rma=1G", *rest)
        assert code != 0
        assert "there is no -vm key with this name" in err
        assert "rma=1G" in err
    code, _, err = ended(clean, "sbatch", "--wrap=true", env={"SBATCH_VM": "ram"}.items())
    assert code != 0
    assert "has no '='" in err
    for command in (["sbatch", ":", VM, "--wrap=true"], ["srun", VM, "true", ":", "true"]):
        code, _, err = ended(clean, *command)
        assert code != 0
        assert "only the first component of sbatch and salloc can have it" in err
    for name in ("sbatch", "srun", "salloc"):
        assert "--vm=KEY=VALUE" in ended(clean, name, "--help")[1]
    assert clean.root("head", "squeue", "-h") == ""


FILTER = f"""
package=$({slurm.PREFIX}/python3 -c 'import vtorque_slurm as s; print(s.__path__[0])')
sed 's|/opt/vtorque/bin|{slurm.PREFIX}|' $package/spank/cli_filter.lua > /etc/slurm/cli_filter.lua
cp /etc/slurm/slurm.conf /root/slurm.conf
echo CliFilterPlugins=lua >> /etc/slurm/slurm.conf
"""


@pytest.fixture
def filtered(clean):
    """Switch cli_filter/lua on at the submit host."""
    clean.root("head", "sh", "-ec", FILTER)
    yield clean
    clean.root("head", "sh", "-c", "mv /root/slurm.conf /etc/slurm/; rm /etc/slurm/cli_filter.lua")


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ((VM,), {"Features": "vtorque", "MinCPUsNode": "1", "MinMemoryNode": "556M"}),
        (
            ("--vm=vcpus=2,ram=300M", "-Cvtorque|vtorque", "--mem=1G"),
            {"Features": "vtorque|vtorque", "MinCPUsNode": "2", "MinMemoryNode": "1G"},
        ),
        ((VM, "-c2"), {"Features": "vtorque", "MinCPUsNode": "2", "MinMemoryNode": "556M"}),
        (("--vm=none",), {"Features": "(null)", "MinCPUsNode": "1", "MinMemoryNode": "0"}),
        ((), {"Features": "(null)", "MinCPUsNode": "1", "MinMemoryNode": "0"}),
    ],
)
def test_cli_filter_adds_what_vsub_adds(filtered, args, wanted):
    argv = ("sbatch", "--parsable", "--hold", *args, "--wrap=true")
    job_id = filtered.user(*argv).stdout.decode().strip()
    shown = filtered.show(job_id)
    filtered.user("scancel", job_id)
    assert {name: shown[name] for name in wanted} == wanted


def test_uninstall_restores_files_with_the_sites_own_plugin(clean):
    """No job runs in between: the files are as before, byte for byte."""
    files = (STACK, "/etc/slurm/slurm.conf")

    def contents():
        return [clean.root("n3", "cat", file) for file in files]

    clean.root("n3", "vtorque", "setup", "uninstall")
    try:
        clean.root("n3", "tee", STACK, stdin=b"optional /usr/lib/site.so a=1\n# no newline")
        before = contents()
        clean.root("n3", "vtorque", "setup", "install", "--batch", "slurm")
        assert "/usr/lib/site.so a=1\n# no newline" in contents()[0] != before[0]
        assert contents()[1] != before[1]
        clean.root("n3", "vtorque", "setup", "uninstall")
        assert contents() == before
    finally:
        clean.root("n3", "rm", STACK)
        clean.root("n3", "vtorque", "setup", "install", "--batch", "slurm")


# -- nodes that would run the script on the host ---------------------------------------------------


BREAK = {
    "no line in plugstack.conf": f"sed -i '/vtorque-spank/d' {STACK}",
    "no plugin file": f"rm {PLUGIN}",
    "plugin of another release": f"sed -i 's/for Slurm 0x....../for Slurm 0x150800/' {PLUGIN}",
}


@pytest.fixture
def broken(clean):
    """Return a function that breaks the plugin on n1. The plugin is restored after the test."""
    clean.root("n1", "sh", "-c", f"cp -a {PLUGIN} /root/plugin; cp -a {STACK} /root/stack")

    def do(command):
        clean.root("n1", "sh", "-c", f"cp -a /root/plugin {PLUGIN}; cp -a /root/stack {STACK}")
        clean.root("n1", "sh", "-c", command)

    yield do
    do("rm /root/plugin /root/stack")


def idle(cluster, node):
    return cluster.states()[node].split()[0] == "idle"


@pytest.mark.parametrize("how", sparing.each(3, BREAK))
def test_node_without_plugin_refuses_vm_jobs_and_runs_plain_ones(clean, broken, how):
    """The script never runs on the host: the job waits for another node, and the node stays up."""
    broken(BREAK[how])
    script = clean.script("#!/bin/sh\ntouch ran\n")
    job_id = clean.user("sbatch", "--parsable", "-wn1", VM, script).stdout.decode().strip()
    clean.wait(lambda: clean.show(job_id).get("ExcNodeList") == "n1", what="requeue without n1")
    code, _, err = ended(clean, "srun", "-wn1", VM, "touch", "ran")
    assert code != 0, err
    clean.wait(lambda: idle(clean, "n1"), what="n1 takes jobs again")
    note = clean.root("head", "scontrol", "show", "job", job_id)
    assert "Slurm does not start the job shell of --vm= jobs" in note
    clean.user("scancel", job_id)
    plain = ("sbatch", "-W", "-wn1", "-oout", clean.script("#!/bin/sh\nhostname\n", "plain.sh"))
    assert ended(clean, *plain)[0] == 0
    assert clean.read("out") == b"n1\n"
    said = clean.root("n1", "vtorque", "doctor", check=False)
    assert "jobs with --vm= are refused on this node" in said
    assert not (clean.home / "ran").exists()


def test_plugin_that_finds_no_file_of_vtorque_breaks_no_plain_job(clean, broken):
    """Job shell, proofs and vsub are missing on the node, and then on the submit host, too."""
    missing = f"sed -i 's|=/|=/missing/|g' {STACK}"
    script = clean.script("#!/bin/sh\nhostname\n")
    broken(missing)
    assert ended(clean, "sbatch", "-W", "-wn1", "-oout", VM, script)[0] == 120
    said = "vtorque: the job shell is missing on this node; nothing was run\n"
    assert clean.read("out").decode() == said
    clean.root("head", "sh", "-c", f"cp -a {STACK} /root/stack; {missing}")
    try:
        code, _, err = ended(clean, "sbatch", VM, script)
        assert code == 1
        assert f"vtorque: /missing{slurm.PREFIX}/vsub: No such file or directory" in err
        clean.user("sbatch", "-W", "-wn1", "-oout", script)
        assert clean.read("out") == b"n1\n"
        for command in (("srun",), ("salloc", "srun")):
            done = clean.user(command[0], "-wn1", *command[1:], f"./{script}")
            assert done.stdout == b"n1\n"
    finally:
        clean.root("head", "mv", "/root/stack", STACK)


def test_job_whose_prologue_did_not_run_is_refused_by_the_job_shell(clean):
    hook = "/etc/slurm/vtorque/prolog.d/50-vtorque"
    skip = f"cp -a {hook} /root/hook; printf '#!/bin/sh\\n' > {hook}"
    clean.root("n1", "sh", "-c", skip)
    try:
        script = clean.script("#!/bin/sh\ntouch ran\n")
        assert ended(clean, "sbatch", "-W", "-wn1", "-oout", VM, script)[0] == 120
        env = {"SBATCH_VM": "ram=300M"}.items()
        assert ended(clean, "sbatch", "-W", "-wn1", "-oout2", script, env=env)[0] == 120
        code, _, err = ended(clean, "srun", "-wn1", VM, "touch", "ran")
        assert code == 120
    finally:
        clean.root("n1", "mv", "/root/hook", hook)
    for said in (clean.read("out").decode(), clean.read("out2").decode(), err):
        assert "root has not proven on this node" in said
    assert not (clean.home / "ran").exists()
