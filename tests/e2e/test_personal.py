"""vTorque without root: ordinary users on a machine without a site, from an empty home."""

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from busybox_layout import busybox_layout
from doc_blocks import block
from firmware_disk import debian_disk
from patience import eventually, wait_for
from registry import Registry
from terminal import PROMPT, STARTED, on_a_node
from users import remove_user, run

pytestmark = pytest.mark.e2e

NAME = "vtorque-e2e"
REPO = Path(__file__).resolve().parents[2]
ONE, OTHER = "vte2ep1", "vte2ep2"
PROGRAMS = ("local serve", "local.acceptor", "qemu-system", "virtiofsd", "jobshell", "libvirtd")
BLOCK = ("-W", "block=true", "-j", "oe", "-o", "out")
VIRSH = ("/usr/bin/virsh", "-q", "-c", "qemu:///session", "list")
OUTLIVE = ("vtorque", "libvirtd", "virtlogd")  # entries that may exist without jobs


class Person:
    """A user with only a home, who runs the commands of an installation."""

    def __init__(self, name):
        remove_user(name)
        run("useradd", "-m", "-s", "/bin/bash", name)
        self.user, self.entry = name, pwd.getpwnam(name)
        self.home = Path(self.entry.pw_dir)
        self.home.chmod(0o700)
        self.own = self.home / ".config/vtorque/vtorque.toml"
        self.state = self.home / ".local/state/vtorque"
        self.squatted = Path("/tmp", f"vtorque-{self.entry.pw_uid}")
        self.squatted.mkdir(mode=0o700, exist_ok=True)  # by another user, before the first command

    @property
    def runtime(self):
        """Return the runtime directory in /tmp of a user without a session."""
        return (self.state / "run").readlink()

    @property
    def run_dir(self):
        """The directory of sockets, locks and proofs."""
        return self.runtime / "vtorque"

    def command(self, program, *argv):
        """Return a command of the installation, for the user's site."""
        # Without it these would be the site's, if this machine is a node.
        site = any(os.path.lexists(f"/{top}/vtorque") for top in ("etc", "var/lib"))
        config = ["--config", str(self.own)] if site and program in ("vsub", "vmgr") else []
        return (f"/opt/{NAME}/bin/{program}", *config, *argv)

    def call(self, program, *argv, check=True, timeout=300):
        """Run a command as the user, who has no root and no session."""
        who = self.entry
        return run(
            *((program, *argv) if program.startswith("/") else self.command(program, *argv)),
            check=check,
            timeout=timeout,
            cwd=who.pw_dir,
            env={"PATH": "/usr/bin:/bin", "HOME": who.pw_dir, "LANG": "C.UTF-8"},
            user=who.pw_uid,
            group=who.pw_gid,
            extra_groups=[],
            umask=0o022,
        )

    def script(self, text):
        """Write a job script into the home; return its name."""
        path = self.home / "job.sh"
        path.write_text(text)
        return path.name

    def job(self, text, *argv, timeout=300):
        """Run a job to its end; return exit code, its output, vsub's output."""
        script = self.script(text)
        done = self.call("vsub", *BLOCK, *argv, script, check=False, timeout=timeout)
        out = self.home / "out"
        said = out.read_text() if out.exists() else ""
        out.unlink(missing_ok=True)
        return done.returncode, said, done.stderr.decode()

    def processes(self):
        """Return the pid and the command line of each of the user's processes."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if place.stat().st_uid == self.entry.pw_uid:
                    words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(place.name)] = words
        return {pid: words for pid, words in found.items() if words}

    def left(self):
        """Return what exists of jobs: files, processes, domains."""
        tops = [self.state / "jobs", self.state / "journal", self.run_dir / "jobs"]
        tops += [self.run_dir / "proof", self.home / ".cache/libvirt/qemu/log"]
        files = [str(path) for top in tops for path in top.rglob("*")]
        running = [w for w in self.processes().values() if not any(n in w for n in OUTLIVE)]
        running += [w for w in self.processes().values() if " hook " in w or " jobshell " in w]
        names = self.call(*VIRSH, "--all", "--name")
        return [*files, *running, *names.stdout.decode().split()]

    def end(self):
        """Stop the user's service, and remove the user with all files."""
        with suppress(pytest.fail.Exception):
            self.call("vtorque", "local", "stop", "--config", str(self.own))
        with suppress(FileNotFoundError):
            subprocess.run(["rm", "-rf", self.runtime], check=True)
        self.squatted.rmdir()
        remove_user(self.entry.pw_name)


@pytest.fixture(scope="module")
def installed():
    """Install this checkout like the node of these tests; it is not set up as a site."""
    run(REPO / "scripts/node", "prefix", "--name", NAME, timeout=900)


@pytest.fixture(scope="module")
def first_user(installed):
    """Return a user with an image and a service."""
    person = Person(ONE)
    yield person
    person.end()


@pytest.fixture
def clean(first_user):
    """Fail the test if it leaves anything of a job."""
    yield first_user
    for job in json.loads(first_user.call("vmgr", "ps", "--json").stdout):  # left by a failed test
        first_user.call("vmgr", "cancel", job["id"], check=False)
    eventually(lambda: not first_user.left())


def test_first_job_from_an_empty_home_runs(clean):
    """The job builds its image, runs as the user, and returns the script's exit code."""
    assert not clean.state.exists()
    text = "echo on $(uname -r) $(hostname) as $(id -un) in $PWD; touch made\nexit 42\n"
    code, said, told = clean.job(text)
    assert code == 42, told
    assert said.endswith(f" as {ONE} in {clean.home}\n")
    assert os.uname().nodename not in said.split()
    assert (clean.home / "made").stat().st_uid == clean.entry.pw_uid
    assert "building the image micro, once" in told
    assert [w for w in clean.processes().values() if "local serve" in w]
    for path, mode in ((clean.run_dir, 0o40700), (clean.run_dir / "local.sock", 0o140600)):
        assert path.lstat().st_mode == mode
    code, said, told = clean.job("cat made job.sh; exit 3\n", "-vm", "vcpus=2,vms_per_node=2")
    assert (code, said) == (3, "cat made job.sh; exit 3\n"), told
    assert "image" not in told


@pytest.mark.full
def test_array_has_a_guest_for_each_task(clean):
    done = clean.call(
        "vsub", *BLOCK, "-t", "3,5%1", clean.script("exit $PBS_ARRAYID\n"), check=False
    )
    assert done.returncode == 5, done.stderr
    for task in ("3", "5"):
        (clean.home / f"out-{task}").unlink()


@pytest.mark.full
def test_first_jobs_of_the_manual_run(clean):
    """The jobs are those of the two ten-minutes pages, tutorial.md and user.md, word for word."""
    paths = f"PATH=/opt/{NAME}/bin:$PATH; set -e\n"

    def bash(text):
        """Run lines as the user: ``vsub`` and ``vmgr`` belong to this site."""
        own = "".join(
            f'{program}() {{ command {program} --config {clean.own} "$@"; }}\n'
            for program in ("vsub", "vmgr")
            if "--config" in clean.command(program)
        )
        return clean.call("/bin/bash", "-c", f"{paths}{own}{text}").stdout.decode()

    (clean.home / "job.sh").unlink(missing_ok=True)  # of another test, as root
    said = bash(block("doc/ten-minutes-admin.md", "echo"))
    assert re.fullmatch(rf"(?s).*exit code 3\non vvm as {clean.user}\n", said), said

    clean.script(block("doc/ten-minutes-user.md", "echo"))
    job = bash(block("doc/ten-minutes-user.md", "vsub -j oe")).split()[-1]
    ps, log, *_ = block("doc/ten-minutes-user.md", "vmgr ps").replace("JOB", job).splitlines()
    assert job.partition(".")[0] in bash(ps)
    eventually(lambda: job not in bash(ps))
    assert (clean.home / "hello.out").read_text() == f"on vvm as {clean.user} in {clean.home}\n"
    assert "release" in bash(log)

    (clean.home / "pi.sh").write_text(block("doc/tutorial.md", "#!/bin/sh"))
    submit, *_ = block("doc/tutorial.md", "vsub -j oe -o pi.out pi.sh").splitlines()
    job = bash(submit.replace("-j oe", "-v N=1000 -j oe")).split()[-1]
    eventually(lambda: job not in bash("vmgr ps"))
    assert (clean.home / "pi.out").read_text().startswith("pi is about 3.")

    clean.script(block("doc/user.md", "#!/bin/bash"))
    shown = block("doc/user.md", "$ vsub").splitlines()
    submit, show, cat = (line[2:] for line in shown if line.startswith("$ "))
    job = bash(submit).split()[-1]
    eventually(lambda: job not in bash("vmgr ps"))
    assert "exit code 3" in bash(show.replace(" 3 ", f" {job} "))
    said = bash(cat)
    assert re.fullmatch(rf"on vvm, kernel \S+, as {clean.user} in {clean.home}\n", said)


@pytest.mark.full
def test_interactive_job_gives_a_shell_in_a_guest(clean):
    terminal = on_a_node(clean, "-I", "-vm", "ram=256M")
    terminal.read(STARTED)
    terminal.read(PROMPT)
    terminal.write(b"id -un; tty\r")
    assert terminal.read(rb"\n(\S+)\r\n/dev/")[1].decode() == ONE
    assert terminal.leave(7) == 7


def test_option_that_needs_root_is_refused_by_name(clean):
    clean.script("true\n")
    for key in ("fs_type=ramdisk", "hugepages=true", "iocm=true", "pci=gpu:1", "vrdma=true"):
        refused = clean.call("vsub", "-vm", key, "job.sh", check=False)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"vsub: {key}: needs root, ".encode())
    assert clean.call("vtorque", "setup", "install", check=False).returncode == 2


def test_doctor_reports_no_failure(clean):
    told = clean.call("vtorque", "doctor", "--json", "--config", str(clean.own), check=False)
    assert [each for each in json.loads(told.stdout) if each["status"] == "failed"] == []


@pytest.fixture
def other_user(first_user):
    """Return another user, with a copy of the image."""
    person = Person(OTHER)
    run("cp", "-a", first_user.home / ".local", person.home)
    run("rm", "-r", person.state)
    run("chown", "-R", f"{OTHER}:", person.home)
    person.call("vmgr", "images", "verify", "micro")  # the hashed file was another one
    yield person
    eventually(lambda: not person.left())
    person.end()


def test_users_cannot_see_each_others_jobs_and_services(clean, other_user):
    """Both have a running job: neither sees the other's, nor can connect to their service."""
    mine = clean.call("vsub", clean.script("touch began; sleep 300\n")).stdout.decode().strip()
    code, said, told = other_user.job("ls /home; ls " + str(clean.home) + "; exit 5\n")
    assert code == 5, told
    assert said.splitlines()[0] == OTHER
    assert ONE not in said.splitlines()[:-1]
    eventually((clean.home / "began").exists)
    assert json.loads(other_user.call("vmgr", "ps", "--json").stdout) == []
    assert [each["id"] for each in json.loads(clean.call("vmgr", "ps", "--json").stdout)] == [mine]
    for path in (clean.run_dir / "local.sock", clean.state / "site.secret"):
        assert other_user.call("/usr/bin/stat", str(path), check=False).returncode != 0
    assert b"vt-" not in other_user.call(*VIRSH).stdout
    clean.call("vmgr", "cancel", mine)


@pytest.mark.full
def test_killed_service_leaves_nothing_after_the_next_command(clean):
    kill(clean, "local serve")


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
def test_killed_program_leaves_nothing_after_the_next_command(clean, program):
    kill(clean, program)


def kill(person, program):
    """Kill a program while a job runs, then run another job."""
    began = person.home / "began"
    began.unlink(missing_ok=True)
    text = person.script("touch began; sleep 300\n")
    job = person.call("vsub", "-j", "oe", "-o", "lost", text).stdout.decode().strip()
    eventually(began.exists)
    pid = next(pid for pid, words in person.processes().items() if program in words)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: program not in person.processes().get(pid, ""))
    person.call("vmgr", "cancel", job, check=False)  # it may have ended
    assert person.job("exit 6\n")[0] == 6
    eventually(lambda: not person.left())


@pytest.mark.full
def test_twenty_consecutive_jobs_leave_nothing(clean):
    for number in range(20):
        assert clean.job(f"exit {number}\n")[0] == number
        assert clean.left() == []


@pytest.mark.full
def test_idle_service_ends_and_the_next_job_starts_it(clean):
    """The service and libvirt's daemons end after a minute without jobs."""
    assert clean.job("exit 7\n")[0] == 7
    eventually(lambda: not clean.processes(), 300)
    assert not (clean.run_dir / "local.sock").exists()
    assert clean.job("exit 8\n")[0] == 8


OWN = """#!/bin/sh
echo "$(id -un) in $PWD, $GREETING, $(cat /etc/os-release)"
mkdir /written 2>/dev/null || echo not root
ls /lib/modules/*/modules.dep | cut -d/ -f1-3
grep -o '^overlay / overlay [^,]*,nosuid' /proc/mounts
grep ' /home' /proc/mounts | cut -d' ' -f3
exit 7
"""


@pytest.fixture
def layout(clean):
    """Return an OCI layout with busybox, in the user's home."""
    path = busybox_layout(clean.home / "app", ONE)
    yield path
    shutil.rmtree(path)


def test_job_runs_in_own_image(clean, layout):
    """The image is converted once."""
    code, said, told = clean.job(OWN, "-vm", f"img=oci:{layout},work=home")
    assert code == 7, told
    assert said.splitlines() == [
        f"{ONE} in {clean.home}, hello, ID=mine",
        "not root",
        "/lib/modules",
        "overlay / overlay rw,nosuid",
        "virtiofs",
    ]
    assert "converting it, once" in told
    code, again, told = clean.job(
        OWN, "--no-pull", "-vm", f"img=oci:{layout},work=home,vms_per_node=2"
    )
    assert (code, again) == (7, said), told
    assert "converting" not in told
    code, _, told = clean.job(OWN, "-vm", f"img=oci:{layout}")
    assert code == 2 and "work=" in told and "is your home" in told
    shown = clean.call("vsub", "--dry-run", "-vm", f"img=oci:{layout},work=home", "job.sh")
    assert b"vtown" in shown.stdout and b"nbd" in shown.stdout
    (row,) = json.loads(clean.call("vmgr", "images", "list", "--mine", "--json").stdout)
    assert row["reference"] == f"oci:{layout}"
    clean.call("vmgr", "images", "remove", row["name"])
    assert list((clean.home / ".cache/vtorque/images").iterdir()) == []


def test_job_runs_in_image_of_a_registry_that_is_down_later(clean, layout, tmp_path):
    """The registry requires a password, which ``skopeo login`` has stored."""
    registry = Registry(tmp_path / "registry")
    registry.start()
    image = registry.push(layout, "app:1")
    for name in (".config/containers", ".docker"):
        (clean.home / name).mkdir(parents=True)
    settings = registry.place / ".config/containers/registries.conf"
    shutil.copy(settings, clean.home / ".config/containers")
    shutil.copy(registry.place / "auth.json", clean.home / ".docker/config.json")
    run("chown", "-R", f"{ONE}:", clean.home / ".config", clean.home / ".docker")
    wanted = ("-vm", f"img={image},work=home")
    code, said, told = clean.job(OWN, *wanted)
    assert (code, said.splitlines()[0]) == (7, f"{ONE} in {clean.home}, hello, ID=mine"), told
    registry.stop()
    code, again, told = clean.job(OWN, "--no-pull", *wanted)
    assert (code, again) == (7, said), told
    shutil.rmtree(clean.home / ".docker")
    shutil.rmtree(clean.home / ".config/containers")


AS_ROOT = """#!/bin/sh
echo "$(id -u) in $PWD, $HOME"
ls -a $HOME
cd $HOME/app
mkdir /written && echo wrote
touch made && cat index.json >/dev/null
chown 1:1 made || echo no chown
mknod device c 1 3 || echo no device
cat /bin/busybox >program && chmod 4755 program || echo no setuid
mkdir -p deep/er && touch deep/er/file
grep -c '^overlay / overlay [^ ]*nosuid' /proc/mounts
exit 8
"""


def test_script_of_own_image_runs_as_root_with_the_users_ids_on_shares(clean, layout):
    code, said, told = clean.job(AS_ROOT, "-vm", f"img=oci:{layout},root=script,work=app")
    lines = [line for line in said.splitlines() if ": " not in line]
    assert code == 8, told
    assert lines == [
        f"0 in {clean.home}, {clean.home}", ".", "..", "app",
        "wrote", "no chown", "no device", "no setuid", "0",
    ], said  # fmt: skip
    for name in ("made", "program", "deep/er/file"):
        status = (layout / name).stat()
        assert (status.st_uid, status.st_gid) == (clean.entry.pw_uid, clean.entry.pw_gid)
    assert not (layout / "device").exists()


WITH_SUDO = """#!/bin/sh
echo "$(id -u) $HOME"
cd $HOME/app
touch mine
sudo id -u
sudo touch of-root && stat -c '%u %g' of-root mine
sudo sh -c 'mkdir /etc/made; touch /etc/made/it' && sudo ls /etc/made
sudo sh -c 'cat mine >>of-root; chmod 600 of-root'
echo more >>of-root && cat of-root
sudo chown 1:1 mine || echo no chown
sudo mknod device c 1 3 || echo no device
sudo A=b sh -c 'echo $A $HOME $SUDO_USER $SUDO_UID'
sudo -u nobody id -u
sudo -u nobody sudo id -u || echo not nobody
sudo -u nobody cat of-root || echo not readable
sudo no-such-program || echo $?
sudo chmod 4755 of-root || echo no setuid
chmod 2755 mine || echo no setgid
exit 9
"""


@pytest.mark.releases
def test_sudo_in_own_image_gives_root_with_the_users_ids_on_shares(clean, layout):
    """Debian 12's virtiofsd cannot map two users to one, and the job is refused."""
    wanted = ("-vm", f"img=oci:{layout},root=true,work=app")
    code, said, told = clean.job(WITH_SUDO, *wanted)
    if b"--translate-uid" not in run("/usr/lib/qemu/virtiofsd", "--help").stdout:
        assert code == 2 and "virtiofsd 1.13" in told and "root=script" in told
        return
    uid, gid = clean.entry.pw_uid, clean.entry.pw_gid
    lines = [line for line in said.splitlines() if ": " not in line]
    assert (code, lines) == (9, [
        f"{uid} {clean.home}", "0", f"{uid} {gid}", f"{uid} {gid}", "it", "more", "no chown",
        "no device", f"b /root {ONE} {uid}", "65534", "not nobody", "not readable", "1",
        "no setuid", "no setgid",
    ]), (said, told)  # fmt: skip
    for name in ("mine", "of-root"):
        status = (layout / name).stat()
        assert (status.st_uid, status.st_gid) == (uid, gid)
    assert not (layout / "device").exists()


def test_own_image_that_does_not_boot_fails_its_job(clean, layout):
    """The guest cannot mount a damaged image, and the console says why."""
    pulled = clean.call("vmgr", "images", "pull", f"oci:{layout}").stdout.decode()
    file = Path(pulled.rpartition(": ")[2].strip())
    file.chmod(0o600)
    file.write_bytes(bytes(file.stat().st_size))
    code, said, told = clean.job("exit 0\n", "--no-pull", "-vm", f"img=oci:{layout},work=home")
    assert code == 121, (said, told)
    assert "did not become ready" in said
    assert "no squashfs that can be mounted" in said
    file.unlink()


# A boot sector for BIOS: it writes itself to sector 2 with INT 13h, prints the text that follows it
# on the serial port if that succeeded, and reports a panic to QEMU (docs/specs/pvpanic.rst).
BOOT_SECTOR = bytes.fromhex(
    "31c08ed88ec0b80103b9020030f6bb007ccd13721abe387cac84c0741288c4bafd03eca82074fb88e0baf803ee"
    "ebe9ba0505b001eef4ebfd"
)


def test_own_disk_is_booted_by_firmware_and_not_changed(clean):
    """The guest writes to its disk, and never becomes ready: the job's failure."""
    raw = clean.home / "disk"
    text = b"vtorque-test: booted and wrote\r\n"
    raw.write_bytes((BOOT_SECTOR + text).ljust(510, b"\0") + b"\x55\xaa" + bytes(1 << 20))
    for kind in ("raw", "qcow2"):
        run("qemu-img", "convert", "-f", "raw", "-O", kind, raw, clean.home / f"own.{kind}")
        disk = clean.home / f"own.{kind}"
        run("chown", f"{ONE}:", disk)
        before = disk.read_bytes()
        code, said, told = clean.job("exit 0\n", "-vm", f"img=./{disk.name},work=home")
        assert code == 121, (said, told)
        assert "the guest with your own image did not become ready" in said
        assert text.decode().strip() in said
        assert disk.read_bytes() == before
        assert "building the image" not in told


OWN_KERNEL = """#!/bin/sh
echo "$(id -u) $HOME $(cat /etc/debian_version)"
uname -r
test -e /sys/firmware/efi && echo by UEFI
modprobe dummy && grep -c ^dummy /proc/modules
findmnt -no FSTYPE,LABEL /
cd $HOME/app
touch made
chown 1:1 made || echo no chown
echo saved >/etc/marker && chmod 644 /etc/marker
sync
touch ready
while ! [ -e go ]; do sleep 0.2; done
"""


@pytest.fixture
def own_debian(clean, scratch):
    """Return Debian's own kernel and system on a disk of the user."""
    disk, app = clean.home / "debian.qcow2", clean.home / "app"
    shutil.move(debian_disk(scratch), disk)
    app.mkdir()
    # Emulated UEFI reads the kernel slowly.
    clean.own.parent.mkdir(parents=True, exist_ok=True)
    clean.own.write_text("[node]\nstart_timeout = 1800\n")
    run("chown", "-R", f"{ONE}:", disk, app, clean.home / ".config")
    yield disk
    clean.own.unlink()
    shutil.rmtree(app)
    disk.unlink()


AGAIN = """#!/bin/sh
id -un
cat /etc/marker
findmnt -no LABEL /
test -e /sys/firmware/efi && echo by UEFI
cd $HOME/app
sudo -n id -u || exit 12
sudo -n touch of-root && sudo -n chown 1:1 of-root || echo no chown
stat -c %u of-root
exit 12
"""


@pytest.mark.full
@pytest.mark.releases
def test_own_disk_boots_its_own_kernel_and_is_saved(clean, own_debian):
    """By UEFI, with the script as root. The file does not change; the saved disk has the changes.

    By BIOS and with sudo, where virtiofsd supports it, the saved disk boots twice.
    """
    before = own_debian.stat()
    app, text = clean.home / "app", clean.script(OWN_KERNEL)
    options = f"img=./{own_debian.name},firmware=efi,root=script,work=app,ram=768M,vcpus=2"
    job = clean.call("vsub", "-j", "oe", "-o", "out", "-vm", options, text).stdout.decode().strip()

    def ended():
        return job not in clean.call("vmgr", "ps", "--json").stdout.decode()

    # vmgr takes CPU time that the emulated guest needs, so wait_for calls it more rarely.
    wait_for(lambda: (app / "ready").exists() or ended(), 2400, "the guest")
    assert (app / "ready").exists(), (clean.home / "out").read_text()
    saved = clean.home / "saved.qcow2"
    clean.call("vmgr", "images", "save", job, str(saved))
    refused = clean.call("vmgr", "images", "save", job, str(saved), check=False)
    assert refused.returncode == 2 and b"exists" in refused.stderr
    (app / "go").touch()
    eventually(ended)
    said = (clean.home / "out").read_text()
    (clean.home / "out").unlink()
    lines = [line for line in said.splitlines() if ": " not in line]
    who, kernel, firmware, module, root, chown = lines
    assert who.startswith(f"0 {clean.home} 12.")
    assert (kernel.endswith("-cloud-amd64"), firmware) == (True, "by UEFI")
    assert not (app / "NvVars").exists(), "the firmware has used the share"
    assert (module, root.split(), chown) == ("1", ["ext4", "ownroot"], "no chown")
    for file in (app / "made", saved):
        assert (file.stat().st_uid, file.stat().st_gid) == (
            clean.entry.pw_uid, clean.entry.pw_gid,
        )  # fmt: skip
    assert b"backing" not in run("qemu-img", "info", saved).stdout

    options, wanted = "work=app,ram=512M,vms_per_node=2", [ONE, "saved", "ownroot"]
    if b"--translate-uid" in run("/usr/lib/qemu/virtiofsd", "--help").stdout:
        options += ",root=true"
        wanted += ["0", "no chown", str(clean.entry.pw_uid)]
    code, said, told = clean.job(AGAIN, "-vm", f"img=./{saved.name},{options}", timeout=2400)
    assert (code, [line for line in said.splitlines() if ": " not in line]) == (12, wanted), told
    saved.unlink()
    after = own_debian.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
