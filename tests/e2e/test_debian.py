"""The same job in a full Debian guest: systemd, cloud-init, sshd; built from Debian's packages."""

import os
import platform
import pty
import shutil
import subprocess
import time

import pytest

import x_display
from terminal import PROMPT, STARTED, CommandTerminal, on_a_node
from vtorque_core.base.errors import EXIT_HOST_FAULT, EXIT_REFUSED
from warm_guests import TELLS, kept_warm, took

pytestmark = pytest.mark.e2e

ARGS = ("-vm", "img=debian,ram=512M,vcpus=2")


@pytest.fixture(scope="module")
def debian(node):
    """Return the node with the image in its pool; built once, a minute and a half."""
    if node.root("vmgr", "images", "show", "debian", check=False).returncode:
        node.root("vmgr", "images", "build", "debian", "debian", timeout=600)
    return node


@pytest.mark.full
@pytest.mark.releases
def test_job_runs_in_a_debian_guest(debian, clean):
    """ssh into it also works while the job runs, with a checked host key."""
    job = debian.submit(
        "#!/bin/bash\n"
        'printf "out\\0\\377\\n"; echo err >&2\n'
        "id -un; pwd; echo $HOME; uname -r; ls /home; nproc; cat /etc/debian_version\n"
        "systemctl is-system-running --wait >/dev/null; systemctl --failed --no-legend | wc -l\n"
        "sudo -n true 2>/dev/null && echo sudo; su -c true </dev/null 2>/dev/null && echo su\n"
        "bash -lc 'echo $PBS_JOBID'\n"
        "touch started; while [ ! -e stop ]; do sleep 0.2; done\n",
        *ARGS,
    )
    started, stop = clean.home / "started", clean.home / "stop"
    clean.wait_for(started.exists, what="the job's start")
    ssh = clean.command("vmgr", "ssh", job, "0", "--", "id -un; hostname")
    try:
        done = _on_a_terminal(clean, ssh)
        _check_ssh_sessions(clean, job)
    finally:
        stop.touch()
    clean.wait_for(lambda: clean.state_of(job) in (None, "C"), what="the job's end")
    started.unlink()
    stop.unlink()
    assert done.split() == [clean.user.encode(), f"v{platform.node()}".encode()]
    assert (clean.home / "err").read_bytes() == b"err\n"
    head, _, rest = (clean.home / "out").read_bytes().partition(b"\n")
    assert head == b"out\0\xff"
    name, cwd, home, kernel, homes, cpus, debian_version, failed, job_id = (
        rest.decode().splitlines()
    )
    assert name == clean.user
    assert cwd == home == str(clean.home)
    assert kernel != platform.release()
    assert homes == clean.user
    assert cpus == "2"
    assert debian_version.startswith("12.")
    assert failed == "0"
    assert job_id == job


@pytest.mark.full
@pytest.mark.releases
def test_guest_runs_another_debian_release(clean):
    """Everything except its kernel, which is the newest of the node's own release."""
    build = ("vmgr", "images", "build", "debian13", "debian", "-o", "suite=trixie")
    clean.root(*build, timeout=900)
    text = (
        "#!/bin/bash\ncat /etc/debian_version; id -un; hostname -I | wc -w; echo mine >made\n"
        "systemctl is-system-running --wait >/dev/null; systemctl --failed --no-legend\n"
    )
    try:
        result = clean.job(text, "-vm", "img=debian13,ram=512M,vcpus=2")
    finally:
        clean.root("vmgr", "images", "remove", "debian13")
    assert (result.code, result.err) == (0, b"")
    version, *rest = result.out.decode().splitlines()
    assert version.startswith("13.")
    assert rest == [clean.user, "1"]
    assert (clean.home / "made").read_text() == "mine\n"
    (clean.home / "made").unlink()


@pytest.mark.full
def test_warm_debian_guest_is_set_up_like_a_cold_one(debian, clean, config):
    """Booted up to cloud-init before a job exists: cloud-init then runs as in a cold boot."""
    text = f"{TELLS}systemctl --failed --no-legend | wc -l; hostname -I | wc -w; nproc\n"
    size = "img=debian vcpus=1 ram=512M"
    with kept_warm(clean, config, size) as warm:
        first, log = warm.job("-vm", size.replace(" ", ","), text=text)
        assert len(took(log)) == 1, log
        cold, log = warm.job("-vm", "img=debian,vcpus=1,ram=513M", text=text)
        assert took(log) == []
    assert cold[5:] == first[5:]
    assert cold[7:] == ["0", "1", "1"]
    assert not set(cold[:3]) & set(first[:3])
    assert int(first[4]) - 1 <= int(first[3]) <= time.time() + 1


@pytest.mark.full
def test_failed_setup_keeps_the_cloud_init_logs(debian, clean, config):
    """The owner sees the reason; the logs have no control sequences and no keys of the guest."""
    scripts = clean.config.parent / "guest-prologue"
    scripts.mkdir()
    script = scripts / "10-fails"
    script.write_text(
        "#!/bin/sh\nprintf '\\033[2J\\377 begins\\n' >>/var/log/cloud-init-output.log\n"
        "echo no licence server >&2\nexit 9\n"
    )
    script.chmod(0o755)
    config("plugin.linux-guest", f'prologue = "{scripts}"')
    try:
        result = clean.job("#!/bin/sh\necho ran\n", *ARGS, timeout=300)
    finally:
        shutil.rmtree(scripts)
    assert (result.code, result.out) == (EXIT_HOST_FAULT, b"")
    assert b"10-fails" in result.err and b"no licence server" in result.err
    job = result.done.stdout.decode().split()[0]
    shown = clean.as_user("vmgr", "logs", "--cloud-init", job).stdout
    assert all(c.isprintable() or c == "\n" for c in shown.decode())
    setup, _, rest = shown.partition(b"==> /var/log/cloud-init-output.log <==\n")
    output, _, log = rest.partition(b"==> /var/log/cloud-init.log <==\n")
    assert setup.startswith(b"==> /run/vtorque/setup.log <==\n") and b"no licence server" in setup
    assert b" begins" in output
    assert b"cloud-init" in log and b"init-local" in log
    assert b"PRIVATE KEY" not in shown
    assert clean.as_user("vmgr", "logs", "--console", job).stdout


OF_SITE = """\
#cloud-config
merge_how: "list(append)+dict(no_replace,recurse_list)+str()"
hostname: other
groups: [monitors]
write_files:
- {path: /etc/motd, content: "of the site\\n"}
runcmd:
- ls /home >/etc/homes-seen
"""
OF_USER = """\
#cloud-config
packages: [coreutils]
write_files:
- path: HOME/.config/tool
  content: "it's\\n"
  permissions: '0600'
- {path: HOME/links/new, content: mine}
runcmd:
- [sh, -c, 'id -un >by; grep Cap /proc/self/status >>by']
"""
LOOK = """\
#!/bin/bash
hostname; cat /etc/motd /etc/homes-seen; getent group monitors | cut -d: -f1
dpkg-query -W -f '${Status}\\n' coreutils; test -e /run/image-was-here && echo image
stat -c %U:%a .config/tool; cat .config/tool by; cat links/new
"""


@pytest.fixture
def fragments(debian, clean, config):
    """Cloud-config of the site, in root's directory, and one of the image's, in a label."""
    place = clean.config.parent / "guest-cloud-config"
    place.mkdir()
    config("plugin.linux-guest", f'cloud_config = "{place}"')
    own = 'cloud-config={"runcmd": ["touch /run/image-was-here"]}'
    clean.root("vmgr", "images", "label", "debian", own)
    yield place
    clean.root("vmgr", "images", "label", "debian", "cloud-config-")
    shutil.rmtree(place)


@pytest.mark.full
def test_guest_is_set_up_by_cloud_config_of_site_image_and_user(clean, guest, fragments):
    """Image's, site's and user's; merged, validated and applied by the guest's cloud-init."""
    (fragments / "10-site.cfg").write_text(OF_SITE)
    clean.script(OF_USER.replace("HOME", str(clean.home)), "mine.yaml")
    (clean.home / "links").symlink_to("/etc")  # a link gives no access to more
    args = ("-vm", "img=debian,ram=512M,vcpus=2,cloud_config=mine.yaml")
    refused = clean.job(LOOK, *args, timeout=300)
    assert (refused.code, refused.out) == (EXIT_REFUSED, b"")
    assert b"your cloud-config, in guest" in refused.err
    assert b"Permission denied" in refused.err
    (clean.home / "links").unlink()
    result = clean.job(LOOK, *args, timeout=300)
    assert (result.code, result.err) == (0, b"")
    name, motd, homes, group, status, image, mode, text, by, *caps, new = (
        result.out.decode().splitlines()
    )
    assert (name, motd, group) == (f"v{platform.node()}", "of the site", "monitors")
    assert (homes, image) == (clean.user, "image")
    assert status == "install ok installed"
    assert (mode, text, new) == (f"{clean.user}:600", "it's", "mine")
    assert by == clean.user
    assert {cap.split()[1] for cap in caps if "CapEff" in cap or "CapPrm" in cap} == {"0" * 16}


@pytest.mark.full
def test_invalid_cloud_config_fails_the_start(clean, fragments):
    (fragments / "10-site.cfg").write_text("#cloud-config\nruncmd: 5\n")
    result = clean.job("#!/bin/sh\necho ran\n", *ARGS, timeout=300)
    assert (result.code, result.out) == (EXIT_HOST_FAULT, b"")
    assert b"cloud-config: " in result.err and b"runcmd" in result.err


@pytest.mark.full
def test_failing_site_command_fails_the_start_with_a_message(clean, fragments):
    (fragments / "10-site.cfg").write_text("#cloud-config\nruncmd: [[sh, -c, 'exit 3']]\n")
    result = clean.job("#!/bin/sh\necho ran\n", *ARGS, timeout=300)
    assert (result.code, result.out) == (EXIT_HOST_FAULT, b"")
    assert b"cloud-config: " in result.err


@pytest.fixture
def display(clean):
    """The number of a display whose cookie the user has in pbs_mom's form, and a client of X."""
    x_display.install()
    place, users = clean.home / "x", clean.home / ".Xauthority"
    add = ("MIT-MAGIC-COOKIE-1", x_display.put(place, clean.user))
    ours, theirs = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(theirs), "-auth", place / "cookies", "-listen", "tcp"],
        pass_fds=[theirs], stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    try:
        with os.fdopen(ours, "rb") as told:
            number = int(told.readline())
        subprocess.run(["xauth", "-q", "-f", users, "add", f"unix:{number}.0", *add], check=True)
        shutil.chown(users, clean.user, clean.user)
        yield number
    finally:
        server.terminate()
        server.wait()
        users.unlink(missing_ok=True)
        shutil.rmtree(place)


@pytest.mark.full
def test_client_in_the_guest_reaches_the_display(debian, clean, display):
    """With its cookie only; ssh ends with the job."""
    name = [f"DISPLAY=localhost:{display}.0"]
    terminal = on_a_node(clean, "-I", "-X", *ARGS, environ=name)
    terminal.read(STARTED)
    terminal.read(PROMPT)
    terminal.write(b"hostname; echo $DISPLAY; " + x_display.CLIENT + b"; echo ended-$?\r")
    terminal.read(rb"\rv%s\r\nlocalhost:%d\.0\r\n" % (platform.node().encode(), display))
    terminal.read(rb"vendor string: +The X.Org Foundation")
    terminal.read(rb"ended-0\r")
    terminal.read(PROMPT)
    wrong = b"head -c -16 $XAUTHORITY >x/no; head -c 16 /dev/urandom >>x/no; XAUTHORITY=x/no "
    terminal.write(wrong + x_display.CLIENT + b"; echo ended-$?\r")
    terminal.read(rb"Invalid MIT-MAGIC-COOKIE-1")
    terminal.read(rb"ended-1\r")
    terminal.read(PROMPT)
    terminal.write(b"exit 4\r")
    assert terminal.code() == 4
    left = subprocess.run(
        ["pgrep", "-u", clean.user, "-x", "ssh"], capture_output=True, check=False
    )
    assert left.stdout == b""


@pytest.mark.full
def test_no_display_is_forwarded_without_the_option(debian, clean, display):
    terminal = on_a_node(clean, "-I", "-V", *ARGS, environ=[f"DISPLAY=localhost:{display}.0"])
    terminal.read(STARTED)
    terminal.read(PROMPT)
    terminal.write(
        b"echo none-$DISPLAY$XAUTHORITY-; grep -c :%04X /proc/net/tcp; exit\r" % (6000 + display)
    )
    terminal.read(rb"none--\r\n0\r")
    assert terminal.code() == 1


def _check_ssh_sessions(node, job):
    """Window size, Ctrl-C, end of input and the exit code of ``vmgr ssh`` on a terminal."""

    def ssh(*command):
        become = ["setpriv", f"--reuid={node.user}", f"--regid={node.user}", "--init-groups"]
        argv = node.command("vmgr", "ssh", job, *command)
        return CommandTerminal([*become, "env", "-i", "TERM=xterm", "PATH=/usr/bin:/bin", *argv])

    def ends(terminal, keys, code):
        terminal.write(keys)
        assert terminal.code() == code, terminal.seen

    shell = ssh()
    shell.read(PROMPT)
    shell.write(b"echo at $(hostname) $TERM $(stty size)\r")
    shell.read(rf"at v{platform.node()} xterm 33 101\r".encode())
    shell.resize(41, 121)
    shell.write(b"until stty size | grep '41 121'; do sleep 0.1; done\r")
    shell.read(rb"\n41 121\r|\r41 121\r")
    shell.read(PROMPT)
    shell.interrupt()
    shell.write(b"(exit 9)\r")
    shell.read(PROMPT)
    ends(shell, b"\x04", 9)  # bash ends with the exit code of its last command
    command = ssh("0", "--", "echo running; cat; sleep 86400")
    command.read(rb"running\r\n")
    ends(command, b"\x03", 255)  # as ssh ends at a signal
    # Without a terminal in the guest, the local one edits the line and ends the input.
    ends(ssh("0", "--", "cat; exit 5"), b"last\r\x04", 5)


def _on_a_terminal(node, argv):
    """Run as the user with a terminal, as ssh is used; return the output."""
    import pwd

    entry = pwd.getpwnam(node.user)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        argv, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, user=entry.pw_uid,
        group=entry.pw_gid, extra_groups=[], cwd=entry.pw_dir,
        env={"PATH": "/usr/bin:/bin", "HOME": entry.pw_dir},
    )  # fmt: skip
    os.close(theirs)
    out, err = process.communicate(timeout=180)
    os.close(ours)
    assert process.returncode == 0, err
    return out
