"""Users' own images on a real Slurm: policy and refusals of the nodes, failures, a registry."""

import json
import os
import shlex

import pytest

import slurm_cluster as slurm
from busybox_layout import busybox_layout
from vtorque_core.api.submission import to_token
from vtorque_core.config.request import Request

pytestmark = pytest.mark.e2e

CONFIG = "/etc/vtorque/vtorque.toml"
SHELL = "/usr/libexec/vtorque-jobshell"
HOME = f"/home/{slurm.USER}"
LIMITS = """
[[limits]]
group = "*"
[limits.plugins]
own-images = false

[[limits]]
group = "chemistry"
account = ["lab", "course"]
[limits.plugins]
own-images = true

[[limits]]
account = "course"
[limits.options.root]
allow = ["none"]
"""
REPORT = """#!/bin/sh
echo "$(id -u) in $PWD, $GREETING, $(cat /etc/os-release)"
touch made
exit 7
"""
WAITS = """#!/bin/sh
echo "$(id -u) in $PWD, $GREETING"
touch made
while ! [ -e go ]; do sleep 0.1; done
exit 7
"""
REGISTRY = """
docker-registry serve work/registry.yml </dev/null >work/registry.log 2>&1 &
echo $! >work/registry.pid
until (: </dev/tcp/127.0.0.1/5000) 2>/dev/null; do kill -0 $! || exit 1; sleep 0.1; done
skopeo copy -q oci:work/app docker://127.0.0.1:5000/app:1
"""
INSECURE = '[[registry]]\nlocation = "127.0.0.1:5000"\ninsecure = true\n'
REGISTRY_CONFIG = f"""
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {HOME}/work/registry}}}}
http: {{addr: "127.0.0.1:5000", secret: x}}
"""


@pytest.fixture(scope="module")
def site(own_images):
    """Return the cluster with the base image of container images."""
    own_images.image("own", builder="own")
    return own_images


@pytest.fixture
def layout(site, clean):
    """Return the path of an OCI layout in the user's home, below the directory of submissions."""
    busybox_layout(site.home / "work/app", f"{slurm.UID}:{slurm.UID}")
    os.chown(site.home / "work", slurm.UID, slurm.UID)
    yield f"{HOME}/work/app"
    site.root("head", "rm", "-rf", *(f"{HOME}/{each}" for each in ("work", ".cache", ".config")))


def submit(cluster, text, command, *args, **more):
    """Submit a script from the directory "work"; return the job's id."""
    cluster.script(text, "work/job.sh")
    for each in ("out", "err", "made", "go"):
        (cluster.home / "work" / each).unlink(missing_ok=True)
    argv = (command, "--parsable", "-o", "out", "-e", "err", *args, "job.sh")
    done = cluster.user("sh", "-c", f"cd work && exec {shlex.join(argv)}", **more)
    return done.stdout.decode().strip()


def ended(cluster, job_id):
    """Wait for a job's end; return its exit code, standard output and standard error."""
    cluster.wait_state(job_id, "COMPLETED", "FAILED")
    outputs = [cluster.read(f"work/{each}").decode() for each in ("out", "err")]
    return int(cluster.show(job_id)["ExitCode"].partition(":")[0]), *outputs


def own_job(cluster, text, image, *args, **more):
    """Run a job in an own image with vsub; return exit code and outputs."""
    return ended(cluster, submit(cluster, text, "vsub", "-vm", f"img={image}", *args, **more))


def squashfs(cluster):
    """Return the name of the only converted image in the user's cache."""
    (found,) = (cluster.home / ".cache/vtorque/images").glob("*.squashfs")
    return found.name


def test_job_from_submit_host_is_shown_with_its_image(site, layout):
    """The submit host has neither images nor guests; log, report and ps name image and root."""
    job_id = submit(
        site, WAITS, "vsub", "-w", "n1", "-vm", f"img=oci:{layout},root=script", machine="login"
    )
    site.wait((site.home / "work/made").exists, what="the script")
    name = f"own:{squashfs(site)[:12]},root=script"
    (job,) = json.loads(site.user("vmgr", "ps", "--phase", "--json", job_id).stdout)
    assert (job["on_nodes"][0]["phase"], job["on_nodes"][0]["image"]) == ("run", name)
    (site.home / "work/go").touch()
    assert ended(site, job_id) == (7, f"0 in {HOME}/work, hello\n", "")
    assert (site.home / "work/made").stat().st_uid == slurm.UID
    for command in ("logs", "report"):
        said = site.user("vmgr", command, job_id, machine="n1").stdout.decode()
        assert name in said, said


def test_image_of_submission_runs_though_registry_is_down(site, layout):
    """Slurm's own command pulls the image on the submit host, before the job starts."""
    (site.home / "work/registry.yml").write_text(REGISTRY_CONFIG)
    (site.home / ".config/containers").mkdir(parents=True)
    (site.home / ".config/containers/registries.conf").write_text(INSECURE)
    site.user("bash", "-ec", REGISTRY, machine="login", timeout=60)
    image = "--vm=img=docker://127.0.0.1:5000/app:1"
    argv = ("sbatch", "--hold", "--export=NONE", image)
    job_id = submit(site, REPORT, *argv, machine="login")
    pid = site.read("work/registry.pid").decode().strip()
    site.user("kill", pid, machine="login")
    site.user("scontrol", "release", job_id)
    code, out, err = ended(site, job_id)
    assert (code, out) == (7, f"{slurm.UID} in {HOME}/work, hello, ID=mine\n"), err


@pytest.fixture
def limited(site, layout):
    """Limit own images on the nodes, but not for vsub; return the cached image's path."""
    site.user("vmgr", "images", "pull", f"oci:{layout}")
    for machine in slurm.MACHINES:
        site.root(machine, "cp", "/etc/group", "/etc/group.before")
        site.root(machine, "sh", "-c", f"echo chemistry:x:2999:{slurm.USER} >> /etc/group")
    for node in slurm.NODES:
        site.root(node, "cp", CONFIG, f"{CONFIG}.unlimited")
        site.root(node, "sh", "-c", f"cat >> {CONFIG}", stdin=LIMITS.encode())
    yield f"{HOME}/.cache/vtorque/images/{squashfs(site)}"
    for node in slurm.NODES:
        site.root(node, "mv", f"{CONFIG}.unlimited", CONFIG)
    for machine in slurm.MACHINES:
        site.root(machine, "mv", "/etc/group.before", "/etc/group")


def test_limits_by_group_and_account_are_applied_by_the_node(site, layout, limited):
    """Variables of the user and vsub's config do not count."""
    lies = {"SLURM_JOB_ACCOUNT": "lab", "SLURM_JOB_USER": slurm.OTHER}.items()
    for account, root, words in (
        ("other", "", '[[limits]] 1 (group = "*")'),
        ("course", ",root=script", '[[limits]] 3 (account = "course") [options.root] allow'),
    ):
        image = f"oci:{layout}{root}"
        code, out, err = own_job(site, REPORT, image, f"-A{account}", env=lies)
        assert (code, out) == (121, ""), err
        assert words in err, err
    code, out, err = own_job(site, REPORT, f"oci:{layout},root=script", "-Alab")
    assert (code, out) == (7, f"0 in {HOME}/work, hello, ID=mine\n"), err


def forged(cluster, *pairs, user=slurm.USER):
    """Run a job with a request that vsub has not seen; return exit code and output."""
    path = cluster.home.with_name(user) / "forged.sh"
    path.write_text(f"#!{SHELL}\n#!/bin/sh\necho ran\n")
    comment = "--comment=" + to_token(Request(pairs, {}).encode())
    argv = ("sbatch", "--parsable", "-W", "-Alab", comment, "-o", "forged.out", path.name)
    done = cluster.user(*argv, check=False, user=user)
    return done.returncode, path.with_suffix(".out").read_text()


def test_forged_requests_are_refused_on_the_node(site, limited):
    work, hidden = ("work", f"{HOME}/work"), limited.replace(slurm.USER, slurm.OTHER)
    image = ("img", limited)
    for pairs, words in {
        (image, ("work", "/etc")): "not a directory below your home",
        (image, work, ("pci", "gpu:1")): "pci=gpu:1",
        (image, work, ("unclot", "true")): "unclot",
        (("img", hidden), work): f"img={hidden}: cannot be opened by you",
        (("img", "/etc/shadow"), work): "is not a copy of an image in your cache",
    }.items():
        code, out = forged(site, *pairs)
        assert code == 121 and words in out and "ran" not in out, (pairs, out)
    code, out = forged(site, image, ("work", "home"), user=slurm.OTHER)
    assert code == 121 and '[[limits]] 1 (group = "*")' in out, "the user is not in chemistry"


def test_guest_that_does_not_become_ready_fails_its_job_only(site, layout):
    """Slurm neither requeues the job nor drains its nodes, which run the next job."""
    site.user("vmgr", "images", "pull", f"oci:{layout}")
    path = f".cache/vtorque/images/{squashfs(site)}"
    site.user(
        "sh", "-c", f"chmod u+w {path}; dd if=/dev/zero of={path} bs=1k count=64 conv=notrunc"
    )
    job_id = submit(site, REPORT, "vsub", "--no-pull", "-N2", "-wn1,n2", "-vm", f"img=oci:{layout}")
    code, out, err = ended(site, job_id)
    assert (code, out) == (121, ""), err
    assert "the guest with your own image did not become ready" in err
    assert "no squashfs that can be mounted" in err
    shown = site.show(job_id)
    assert (shown["Requeue"], shown["Restarts"], shown["ExcNodeList"]) == ("1", "0", "(null)")
    for name in ("n1", "n2"):
        node = site.root("head", "scontrol", "show", "node", name)
        assert "ActiveFeatures=vtorque" in node and "Comment=" not in node
    assert site.job("#!/bin/sh\nexit 5\n", "-N2", "-wn1,n2")[0] == 5
