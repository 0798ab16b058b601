"""VM jobs on a real Slurm of three nodes, with real guests: results for users, and leftovers."""

import base64
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import slurm_cluster as slurm

pytestmark = pytest.mark.e2e

SHELL = "/usr/libexec/vtorque-jobshell"


def token(pairs):
    """Return a forged request."""
    blob = json.dumps({"v": 1, "vm": pairs, "files": {}, "shell": None}).encode()
    return "vt1:" + base64.urlsafe_b64encode(b"\0" + blob).decode().rstrip("=")


def test_job_runs_in_a_guest(clean):
    """Check bytes, arguments, environment and exit code, and that the job is unchanged in Slurm."""
    text = (
        "#!/bin/bash\n#SBATCH --comment='my own'\n"
        "printf 'out \\000\\377'; echo err >&2\n"
        'echo " $(hostname) $(uname -r) $(id -un) $PWD"\n'
        'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST $SLURM_NNODES $SLURM_SUBMIT_DIR"\n'
        'echo "${SLURM_CONF-none} $(srun -n1 hostname)"; sbatch x.sh; squeue\n'
        "sed -n 2p $0; exit 5\n"
    )
    code, out, err = clean.job(text)
    assert code == 5
    lines = out.split(b"\n")
    host, kernel, user, here = lines[0].removeprefix(b"out \0\xff ").split()
    assert re.fullmatch(rb"vn[123]", host)
    assert kernel.decode() != os.uname().release
    assert (user.decode(), here.decode()) == (slurm.USER, f"/home/{slurm.USER}")
    job_id, nodes, count, submitted = lines[1].split()
    assert (nodes, count, submitted) == (host, b"1", here)
    assert lines[2] == b"none " + host
    assert lines[3] == b"#SBATCH --comment='my own'", "the guest's script differs from the user's"
    assert err.startswith(b"err\nsbatch: error: does not work inside a virtual machine")
    assert b"squeue: error" in err
    shown = clean.show(job_id.decode())
    assert (shown["JobName"], shown["ExitCode"]) == ("job.sh", "5:0")
    record = clean.root("head", "scontrol", "show", "job", job_id.decode())
    assert re.search(r"^   Comment=my own vt1:\S+ *$", record, re.MULTILINE)


def run_at_once(cluster, script, rows):
    """Run the script once for each row's command line, all at once; return each row's result.

    A result has the exit code, standard output and standard error.
    """

    def run(number):
        files = [f"at-once{number}.{kind}" for kind in ("out", "err")]
        argv = [*rows[number], "-W", "-o", files[0], "-e", files[1], script]
        done = cluster.user(*argv, check=False, timeout=300)
        return done.returncode, *map(cluster.read, files)

    with ThreadPoolExecutor(len(rows)) as pool:
        return list(pool.map(run, range(len(rows))))


SHAPES = [(("-n2", "-vm", "vms_per_node=2"), 1, 2, "1(x2) 1(x2) none 2")]
MORE_SHAPES = [
    (("-c2",), 2, 1, "2 1 2 none"),
    (("-n2",), 2, 1, "2 2 none 2"),
    (("-n2", "-vm", "vcpus=1"), 1, 1, "1 1 none 1"),
    (("-c2", "-vm", "vcpus=1"), 1, 1, "1 1 1 none"),
]


@pytest.mark.parametrize(
    "shapes",
    [SHAPES, pytest.param(MORE_SHAPES, marks=pytest.mark.full)],
    ids=["some-shapes", "more-shapes"],
)
def test_guest_resources_match_the_allocation_and_slurm_variables(clean, shapes):
    """This site requires a RAM size, so that key is needed; CPUs follow the allocation."""
    script = clean.script(
        "#!/bin/sh\necho $(nproc) $SLURM_CPUS_ON_NODE $SLURM_NNODES $SLURM_MEM_PER_NODE\n"
        "echo $SLURM_JOB_CPUS_PER_NODE $SLURM_TASKS_PER_NODE ${SLURM_CPUS_PER_TASK-none}"
        " ${SLURM_NTASKS-none}\n"
        "awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo\n"
    )
    common = ("vsub", "-N1", "--mem=900M", "-vm", "ram=job")
    results = run_at_once(clean, script, [(*common, *args) for args, *_ in shapes])
    for (args, cpus, guests, told), (code, out, err) in zip(shapes, results, strict=True):
        assert code == 0, (args, err)
        mib = 900 // guests - 256
        first, second, third = out.decode().splitlines()
        assert first == f"{cpus} {cpus} {guests} {mib // 2 * 2}", args
        assert second == told, args
        assert mib * 3 // 4 < int(third) < mib, args


def test_script_arguments_stdin_and_wrap(clean):
    """Each way of giving sbatch a script, each native name; jobs from many directories at once."""
    script = clean.script('#!/bin/sh\nprintf "<%s>" "$@"\n', "args.sh")
    jobs = {
        "args": clean.user("vsub", "--parsable", "-o", "args", script, "-vm", "a  b", "'").stdout,
        "in": clean.user("vsub", "--parsable", "-oin", stdin=b"#!/bin/sh\necho piped\n").stdout,
        "wrap": clean.user("vsub", "--parsable", "--wrap", "echo wrapped; exit 3",
                           "--output=wrap", "-vm", "ram=300M").stdout,
    }  # fmt: skip
    ids = {name: said.decode().strip() for name, said in jobs.items()}
    for job_id in ids.values():
        clean.wait_state(job_id, "COMPLETED", "FAILED")
    assert clean.read("args") == b"<-vm><a  b><'>"
    assert clean.read("in") == b"piped\n"
    assert clean.read("wrap") == b"wrapped\n"
    names = {name: clean.show(job_id)["JobName"] for name, job_id in ids.items()}
    assert names == {"args": "args.sh", "in": "sbatch", "wrap": "wrap"}
    assert clean.show(ids["wrap"])["ExitCode"] == "3:0"


def test_script_that_sbatch_rejects_fails_alike_with_vsub(clean):
    for text in (b"echo no interpreter\n", b"#!/bin/sh\r\necho dos\r\n", b""):
        script = clean.script(text)
        ours, its = (clean.user(each, script, check=False) for each in ("vsub", "sbatch"))
        assert (ours.returncode, ours.stderr) == (its.returncode, its.stderr)
        assert ours.returncode != 0
    for args in (["--version"], ["--usage"], ["--wrap", "true", "x"], ["--time=x", "--wrap=:"]):
        ours, its = (clean.user(each, *args, check=False) for each in ("vsub", "sbatch"))
        assert (ours.returncode, ours.stdout, ours.stderr) == (
            its.returncode, its.stdout, its.stderr,
        )  # fmt: skip
    said = clean.user("vsub", "--test-only", clean.script("#!/bin/sh\n"), check=False)
    assert said.returncode == 0
    assert b"to start at" in said.stderr


@pytest.mark.full
def test_script_that_slurm_cannot_start_has_a_reason_everywhere(clean):
    """Slurm opens the output file on the node, after the guest has booted."""
    script = clean.script("#!/bin/sh\ntouch ran\n")
    done = clean.user("vsub", "--parsable", "-w", "n1", "-o", "nodir/x.log", script)
    job_id = done.stdout.decode().strip()
    clean.wait_state(job_id, "FAILED")
    clean.wait(lambda: not clean.guests("n1"), what="release of the guest")
    wanted = "Slurm could not start the script (JobLaunchFailure)"

    def shown(*words):
        return clean.user("vmgr", *words, machine="n1", check=False).stdout.decode()

    clean.wait(lambda: wanted in shown("ps", "--all", "--json"), what="the kept reason")
    assert f"/home/{slurm.USER}/nodir/x.log" in shown("ps", "--all", "--json")
    assert wanted in " ".join(shown("logs", job_id).split())
    assert wanted in " ".join(shown("report", job_id).split())
    assert not (clean.home / "ran").exists()


def test_job_runs_on_two_nodes(clean):
    """Both guests run and are known by name before the script runs, though one node is slow."""
    slow = "/etc/slurm/vtorque/prolog.d/99-slow"
    hook = b"#!/bin/sh\nsleep 4\ndate +%s > /tmp/slow\n"
    clean.root("n2", "sh", "-c", f"cat > {slow}", stdin=hook)
    clean.root("n2", "chmod", "755", slow)
    try:
        code, out, err = clean.job(
            "#!/bin/sh\ndate +%s; hostname; echo $SLURM_JOB_NODELIST $SLURM_NNODES\n"
            "cat /etc/vtorque/slurm/guests\n"
            'for n in vn1 vn2; do nc -w 5 $n 22 </dev/null; echo $? $(grep -c " $n" /etc/hosts); '
            "ping -c 1 -W 5 $n >/dev/null 2>&1; done\n"
            "srun -N1 hostname; srun -N3 true; srun -N2 hostname; exit 6\n",
            "-N2", "-wn1,n2",
        )  # fmt: skip
    finally:
        clean.root("n2", "rm", slow)
    assert code == 6, err
    lines = out.decode().split("\n")
    assert int(lines[0]) >= int(clean.root("n2", "cat", "/tmp/slow"))
    assert lines[1:5] == ["vn1", "vn1,vn2 2", "vn1 1 0", "vn2 1 0"]
    assert [line.split()[-1] for line in lines[5:7]] == ["1", "1"]
    assert lines[7] == "vn1"
    assert b"3 nodes requested, the job has 2 virtual machines" in err
    assert b"this image has no ssh" in err


def test_array_tasks_run(clean):
    """Each element has its own guests; vmgr ps and cancel know it."""
    done = clean.user(
        "vsub", "--parsable", "-a", "2,3", "-o", "el%a",
        clean.script("#!/bin/sh\necho $SLURM_ARRAY_TASK_ID $(hostname) $VTORQUE_JOBID\nsleep 99\n"),
    )  # fmt: skip
    first = done.stdout.decode().strip()
    clean.wait(lambda: all(clean.read(f"el{n}").count(b"\n") for n in (2, 3)), what="outputs")
    lines = [clean.read(f"el{n}").split() for n in (2, 3)]
    assert [line[0] for line in lines] == [b"2", b"3"]
    assert len({tuple(line[1:]) for line in lines}) == 2
    jobs = json.loads(clean.user("vmgr", "ps", "--json").stdout)
    assert {job["id"] for job in jobs} == {line[2].decode() for line in lines}
    assert {job["state"] for job in jobs} == {"R"}
    clean.user("vmgr", "cancel", first)  # like scancel: the whole array
    clean.wait(lambda: not clean.root("head", "squeue", "-h"), what="empty queue")


def test_cancel_in_the_run(clean):
    """The precancel script sees the job script run, which gets TERM; then the guest ends."""
    before = clean.script("#!/bin/sh\nkill -0 $(cat pid) && echo before\n", "before.sh")
    job_id = clean.submit(
        "#!/bin/bash\ntrap 'echo got TERM; exit 9' TERM\necho $$ >pid; echo running\n"
        "while :; do sleep 0.2; done\n",
        "-vm", f"vm_precancel={before}",
    )  # fmt: skip
    clean.wait(lambda: b"running" in clean.read("out"), what="output")
    clean.user("scancel", job_id)
    clean.wait_state(job_id, "CANCELLED")
    clean.wait(lambda: b"got TERM" in clean.read("out"), what="the trap")
    ours = [line for line in clean.read("out").splitlines() if line in (b"before", b"got TERM")]
    assert ours == [b"before", b"got TERM"]


@pytest.mark.full
def test_job_canceled_in_the_prolog_ends_with_its_guest(clean):
    job_id = clean.submit("#!/bin/sh\necho ran\n", "-w", "n1")
    clean.wait(lambda: clean.guests("n1"), what="guest")
    clean.user("scancel", job_id)
    clean.wait_state(job_id, "CANCELLED")
    clean.wait(lambda: not clean.guests("n1"), what="end of the guest")
    assert b"ran" not in clean.read("out")


FORGED = [
    (token([["ram", "999G"]]), b"ram="),
    (token([["img", "no-such"]]), b"no-such"),
    (token([["wings", "2"]]), b"wings=2: "),
    ("vt1:!!", b"is invalid: it is not a vt1 token"),
    ("vt1:in-script", b"is invalid: it is not a vt1 token"),
]


def test_forged_requests_are_refused(clean):
    """Each job ends at once with the reason in its output; the nodes stay usable."""
    script = clean.script(f"#!{SHELL}\n#!/bin/sh\necho ran\n")
    rows = [("sbatch", f"--comment=mine {comment}") for comment, _ in FORGED]
    results = run_at_once(clean, script, rows)
    for (comment, reason), (code, out, err) in zip(FORGED, results, strict=True):
        said = out + err
        assert code == 121, comment
        assert said.startswith(b"vtorque: "), (comment, said)
        assert reason in said, (comment, said)
        assert b"ran" not in said, (comment, said)


LIMITS = """
[[limits]]
partition = "small"
[limits.options.vcpus]
max = 1
[limits.plugins]
pinning = false

[[limits]]
partition = "small"
account = ["rich", "poor"]
[limits.options.vcpus]
max = 2
[limits.plugins]
pinning = true

[[limits]]
account = "poor"
user = "vtslurm*"
[limits.options.vcpus]
max = 1
"""


@pytest.fixture
def limited_cluster(clean):
    """Return the cluster with a second partition, and limits on the nodes, but not on the head."""
    config = "/etc/vtorque/vtorque.toml"
    for node in slurm.NODES:
        clean.root(node, "cp", config, f"{config}.before")
        clean.root(node, "sh", "-c", f"cat >> {config}", stdin=LIMITS.encode())
    clean.root(
        "head", "scontrol", "create", "PartitionName=small", f"Nodes={','.join(slurm.NODES)}"
    )
    yield clean
    clean.wait(lambda: not clean.root("head", "squeue", "-h"), what="empty queue")
    clean.root("head", "scontrol", "delete", "PartitionName=small")
    for node in slurm.NODES:
        clean.root(node, "mv", f"{config}.before", config)


VCPUS, NUMA = "vcpus=2", "numa=preferred"
FIRST = b'[[limits]] 1 (partition = "small")'
THIRD = b'[[limits]] 3 (account = "poor", user = "vtslurm*")'


REFUSED = [
    (("-psmall",), VCPUS, FIRST + b" [options.vcpus] max in /etc/vtorque/vtorque.toml"),
    (("-psmall", "-Apoor"), VCPUS, THIRD),
    (("-pmain", "-Apoor"), VCPUS, THIRD),
    (("-psmall",), NUMA, b"plugin pinning is disabled for this job (set by " + FIRST),
]
ALLOWED = [
    (("-pmain",), VCPUS, b""),
    (("-psmall", "-Arich"), VCPUS, b""),
    (("-psmall", "-Arich"), NUMA, b""),
]


@pytest.mark.parametrize(
    "limited_jobs",
    [
        pytest.param(REFUSED, id="refused"),
        pytest.param(ALLOWED, id="allowed", marks=pytest.mark.full),
    ],
)
def test_limits_by_partition_and_account(limited_cluster, limited_jobs):
    """The data that slurmd gives the node count; variables of the user and vsub's config do not."""
    script = limited_cluster.script("#!/bin/sh\ngrep -c ^processor /proc/cpuinfo\n")
    lies = ("SLURM_JOB_PARTITION=main", "SLURM_JOB_ACCOUNT=rich", "SLURM_JOB_QOS=rich")
    rows = [("env", *lies, "vsub", "-c2", *args, "-vm", asked) for args, asked, _ in limited_jobs]
    results = run_at_once(limited_cluster, script, rows)
    for (args, asked, said), (code, out, err) in zip(limited_jobs, results, strict=True):
        if not said:
            assert (code, out) == (0, b"2\n"), (args, asked, err)
            continue
        assert code == 121, (args, asked)
        assert said in out + err, (args, asked)
        assert (out + err).startswith(b"vtorque: "), "the script has run"


def test_vsub_refuses_by_the_given_partition_and_account(limited_cluster):
    """vsub refuses like the node, but nothing that depends on an unknown partition or account."""
    limited_cluster.script(
        limited_cluster.root("n1", "cat", "/etc/vtorque/vtorque.toml"), "site.toml"
    )
    script = limited_cluster.script("#!/bin/sh\n#SBATCH -p small\necho ran\n")

    def vsub(*args, **env):
        argv = ("vsub", "--config", "site.toml", "-c2", "-vm", VCPUS, "--dry-run", *args, script)
        return limited_cluster.user(*argv, check=False, env=env.items())

    assert vsub("-Aother").returncode == 2
    assert FIRST in vsub("-Aother").stderr
    assert vsub("-Arich").returncode == 0
    assert vsub(SBATCH_ACCOUNT="Poor").returncode == 2
    assert vsub().returncode == 0, "vsub refused by an account that it does not know"
    explain = ("vtorque", "config", "explain", "--file", "site.toml", "--as", slurm.USER)
    said = limited_cluster.user(
        *explain, "--partition", "small", "--account", "rich"
    ).stdout.decode()
    assert re.search(r"^vcpus +default job; max 2 \(line \d+\)$", said, re.MULTILINE)
    assert len(said.splitlines()) <= 24
    assert (
        "plugin pinning: off"
        in limited_cluster.user(*explain, "--partition", "small").stdout.decode()
    )


@pytest.mark.full
def test_long_request_is_sent_in_the_script(clean):
    """The user's files exceed the size of a comment. The script in the guest is unchanged."""
    clean.script("#!/bin/sh\necho before\n# " + os.urandom(3000).hex() + "\n", "before.sh")
    code, out, err = clean.job(
        "#!/bin/sh\nhead -n 3 $0\n# end\n", "-vm", "vm_prologue=before.sh", "--comment=mine"
    )
    assert (code, out) == (0, b"before\n#!/bin/sh\nhead -n 3 $0\n# end\n"), err


@pytest.mark.full
def test_node_without_libvirt_requeues_the_job(clean):
    """The job runs on another node, the node has a note, and stays usable for others."""
    clean.stop_libvirt("n1")
    try:
        code, out, _ = clean.job("#!/bin/sh\nhostname; echo $SLURM_RESTART_COUNT\n")
        host, restarts = out.split()
        assert (code, restarts) == (0, b"1")
        assert host in (b"vn2", b"vn3")
        node = clean.root("head", "scontrol", "show", "node", "n1")
        assert re.search(r"Comment=vTorque: job \d+ did not start on n1: .*libvirt", node)
    finally:
        clean.start_libvirt("n1")
    clean.root("head", "scontrol", "update", "NodeName=n1", "Comment=")


def test_job_that_must_not_be_requeued_ends_with_the_reason(clean):
    clean.stop_libvirt("n1")
    try:
        code, _, err = clean.job("#!/bin/sh\necho ran\n", "--no-requeue", "-w", "n1")
    finally:
        clean.start_libvirt("n1")
    assert code == 122
    assert b"libvirt" in err
    clean.root("head", "scontrol", "update", "NodeName=n1", "Comment=")


def test_killed_prologue_fails_the_job_and_leaves_nothing(clean):
    """No program runs, nothing is left, the node is not drained."""
    job_id = clean.submit("#!/bin/sh\necho ran\n", "-w", "n2")
    clean.wait(lambda: clean.guests("n2"), what="guest")
    pids = clean.processes("n2", "hook --config .* prologue")
    assert pids
    clean.root("n2", "kill", "-9", *pids, check=False)
    clean.wait_state(job_id, "FAILED")
    assert clean.show(job_id)["ExitCode"] == "120:0"
    assert b"root has not proven" in clean.read("out")


@pytest.mark.full
def test_requeued_job_restarts(clean):
    job_id = clean.submit("#!/bin/sh\necho $SLURM_RESTART_COUNT $(hostname)\nsleep 3\n")
    clean.wait(lambda: clean.read("out").count(b"\n"), what="output")
    clean.root("head", "scontrol", "requeue", job_id)
    clean.wait_state(job_id, "COMPLETED")
    assert clean.read("out").split()[0] == b"1"


@pytest.mark.full
def test_script_requeues_its_own_job_and_no_other(clean):
    script = (
        "#!/bin/sh\nscontrol requeue $((SLURM_JOB_ID - 1)) || echo refused\n"
        "[ $SLURM_RESTART_COUNT ] || scontrol requeue $SLURM_JOB_ID || exit 3\n"
        "[ $SLURM_RESTART_COUNT ] || exec sleep 1000\necho $SLURM_RESTART_COUNT\n"
    )
    job_id = clean.submit(script)
    clean.wait_state(job_id, "COMPLETED", "FAILED")
    message, *said = clean.read("out").decode().splitlines()
    assert f"{int(job_id) - 1} is not this job ({job_id}): requeue other jobs" in message
    assert said == ["refused", "1"]
    code, said, error = clean.job(script, "--no-requeue")
    assert (code, said) == (3, b"refused\n")
    assert b"Submit the job with --requeue: JobRequeue=0" in error


def test_bare_metal_job_runs_without_a_guest(clean):
    """``-vm none`` is sbatch; the hooks start no Python, even for requests like vTorque's."""
    script = clean.script("#!/bin/sh\nhostname; echo $0; cat /proc/1/comm; exit 4\n")
    for argv in (["vsub", "-vm", "none"], ["sbatch", "--comment=vt2:x"]):
        done = clean.user(*argv, "-W", "-o", "bare", script, check=False)
        assert done.returncode == 4, done
        host, name, init = clean.read("bare").split()
        assert (host[:1], init) == (b"n", b"tini")
        assert name.endswith(b"slurm_script")


def test_hooks_cost_a_bare_metal_job_almost_no_cpu(cluster):
    """Each hook may use at most 5 ms of CPU more than an empty hook."""
    measure = (
        "import os,subprocess,sys,resource\n"
        "def cost(path):\n"
        "    before = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "    for _ in range(40): subprocess.run([path], check=True)\n"
        "    after = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "    return (after.ru_utime+after.ru_stime-before.ru_utime-before.ru_stime)/40\n"
        "os.environ.update(SLURM_JOB_ID='99999999', SLURM_JOB_COMMENT='a plain one')\n"
        "open('/tmp/empty','w').write('#!/bin/sh\\nexit 0\\n'); os.chmod('/tmp/empty', 0o755)\n"
        "empty = cost('/tmp/empty')\n"
        "for path in sys.argv[1:]: print(cost(path) - empty)\n"
    )
    hooks = [f"/etc/slurm/vtorque/{kind}.d/50-vtorque" for kind in ("prolog", "epilog")]
    said = cluster.root("n1", "/usr/bin/python3", "-c", measure, *hooks)
    assert all(float(line) < 0.005 for line in said.split()), said


@pytest.mark.full
def test_setup_uninstall_restores_slurm_conf(clean):
    """Byte for byte, with a Prolog of the site; setup run twice has the same result as once."""
    conf = "/etc/slurm/slurm.conf"
    clean.root("n3", "vtorque", "setup", "uninstall")
    before = clean.root("n3", "cat", conf)
    assert before == Path("/var/lib", slurm.NAME, "slurm.conf").read_text()
    assert "vtorque" not in clean.root("n3", "ls", "/etc/slurm").split()
    clean.root("n3", "sh", "-c", f"printf 'Prolog=/bin/true # the site' >> {conf}")
    site = clean.root("n3", "cat", conf)
    again = [clean.root("n3", "vtorque", "setup", "install", "--batch", "slurm") for _ in (1, 2)]
    assert "set Prolog=" in again[0]
    assert "Prolog" not in again[1]
    assert clean.root("n3", "readlink", "/etc/slurm/vtorque/prolog.d/90-site") == "/bin/true\n"
    clean.root("n3", "vtorque", "setup", "uninstall")
    assert clean.root("n3", "cat", conf) == site
    clean.root("n3", "sh", "-c", f"cat > {conf}", stdin=before.encode())
    clean.root("n3", "vtorque", "setup", "install", "--batch", "slurm")
    clean.root("n3", "scontrol", "reconfigure")


def test_doctor_marks_the_node(clean):
    clean.stop_libvirt("n1")
    try:
        clean.root("n1", "vtorque", "doctor", "--mark", check=False)
        node = clean.root("head", "scontrol", "show", "node", "n1")
    finally:
        clean.start_libvirt("n1")
        clean.root("n1", "vtorque", "doctor", "--mark", check=False)
    assert "Features=vtorque" not in node
    assert "Comment=vTorque: " in node
    node = clean.root("head", "scontrol", "show", "node", "n1")
    assert "ActiveFeatures=vtorque" in node
    assert "Comment=" not in node


def test_every_option_is_parsed_as_by_sbatch(cluster):
    """The options, and which of them take a value, according to the real sbatch."""
    from vtorque_slurm.options import NONE, REQUIRED, SALLOC, SBATCH

    for program, table in (("sbatch", SBATCH), ("salloc", SALLOC)):
        loop = f'for o; do echo "$o: $({program} $o </dev/null 2>&1 | head -n 1)"; done'
        others = SBATCH.kinds if program == "salloc" else {}  # salloc itself refuses some of them
        names = [name for name in table.kinds if name not in (*table.exact, *others)]
        words = [f"--{n}" if table.kinds[n] == REQUIRED else f"--{n}=x" for n in names]
        said = dict(
            line.partition(": ")[::2]
            for line in cluster.user("sh", "-c", loop, "sh", *words, timeout=60)
            .stdout.decode()
            .splitlines()
        )
        for name, word in zip(names, words, strict=True):
            answer = said[word]
            unknown = "unrecognized option" in answer
            assert not unknown, answer
            assert ("requires an argument" in answer) == (table.kinds[name] == REQUIRED), answer
            assert ("doesn't allow an argument" in answer) == (table.kinds[name] == NONE), answer
