"""Jobs of users whose login shell the image lacks, or whose home is a link or not below /home."""

import os
import pwd
import re
import shutil
from pathlib import Path

import pytest

from terminal import PROMPT, STARTED, on_a_node
from users import run

pytestmark = [pytest.mark.e2e, pytest.mark.releases]

SHOW = 'echo "$1 $SHELL $(grep "^$(id -un):" /etc/passwd | cut -d: -f7)"\n'


@pytest.fixture(params=["/bin/zsh", pytest.param("/bin/csh", marks=pytest.mark.full)])
def missing_shell(request, guest):
    """Give the user a login shell that the micro image lacks, during the test."""
    run("usermod", "-s", request.param, guest.user)
    yield request.param
    run("usermod", "-s", "/bin/bash", guest.user)


@pytest.mark.parametrize(
    ("line", "args"),
    [
        pytest.param("", (), id="without #!"),
        pytest.param("#!/bin/bash\n", ("-S", "/bin/bash"), id="with -S", marks=pytest.mark.full),
    ],
)
def test_missing_login_shell_becomes_sh_everywhere(missing_shell, guest, line, args):
    """passwd and SHELL agree, also in vm_prologue and vm_epilogue."""
    for name in ("pro.sh", "epi.sh"):
        guest.script(f"set -- {name[:3]}\n{SHOW}", name)
    result = guest.job(
        f"{line}set -- job\n{SHOW}exit 3\n",
        "-vm", "ram=256M,vm_prologue=pro.sh,vm_epilogue=epi.sh,vm_precancel=pro.sh", *args,
    )  # fmt: skip
    assert (result.code, result.err) == (3, b"")
    assert result.out.decode().splitlines() == [
        f"{each} /bin/sh /bin/sh" for each in ("pro", "job", "epi")
    ]


@pytest.mark.full
def test_interactive_job_falls_back_to_sh(missing_shell, guest):
    terminal = on_a_node(guest, "-I", "-vm", "ram=256M")
    terminal.read(STARTED)
    terminal.read(PROMPT)
    terminal.write(b"echo -$0-$SHELL-\r")
    assert terminal.read(rb"\n-(\S+)-\r")[1] == b"-sh-/bin/sh"
    assert terminal.leave(7) == 7


@pytest.mark.full
@pytest.mark.parametrize("line", ["", pytest.param("#!/bin/sh\n", marks=pytest.mark.full)])
def test_missing_shell_of_option_S_is_an_error(guest, line):
    result = guest.job(f"{line}echo ran\n", "-vm", "ram=256M", "-S", "/bin/zsh")
    assert (result.code, result.out) == (127, b"")
    assert result.err == (
        b"vtorque: cannot run the shell /bin/zsh (-S): it is missing in image micro. Use -S with a "
        b"shell of the image, or choose an image that has this one (-vm img=)\n"
    )


@pytest.mark.full
def test_missing_interpreter_is_named_with_the_image(guest):
    result = guest.job("#!/usr/bin/python3 -u\nprint(1)\n", "-vm", "ram=256M")
    assert (result.code, result.out) == (127, b"")
    assert re.fullmatch(
        rb"vtorque: cannot run \S+: its interpreter /usr/bin/python3 \(#! line\) is missing in "
        rb"image micro\. Choose an image that has it \(-vm img=\); vmgr images list shows the "
        rb"images\n",
        result.err,
    )


@pytest.fixture
def moved_home(guest):
    """Move the user's home to another file system, in a directory that only root can write.

    Yields the new path. The old path does not exist during the test.
    """
    top = Path("/srv/vtorque-e2e")
    top.mkdir(mode=0o755)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(top))
    home = guest.home
    shutil.copytree(home, top / "u", symlinks=True)
    run("cp", "-a", f"{home}/.", str(top / "u"))
    account = pwd.getpwnam(guest.user)
    os.chown(top / "u", account.pw_uid, account.pw_gid)
    (top / "u").chmod(0o700)
    home.rename(f"{home}.away")
    yield top / "u"
    run("usermod", "-d", str(home), guest.user)
    home.unlink(missing_ok=True)
    Path(f"{home}.away").rename(home)
    run("umount", str(top))
    top.rmdir()


# Prints HOME, the working directory, and the directory to which each path of the home leads.
SHOW_NAMES = (
    "#!/bin/sh\n"
    'cd "$PBS_O_WORKDIR" && echo work >made && cd "${PBS_O_INITDIR:-$HOME}" || exit 9\n'
    'echo "$HOME $(pwd -P) $(cd && pwd -P)"\n'
    "for name in NAMES; do echo $(cd $name/sub && pwd -P && cat in made); done\n"
)


@pytest.mark.parametrize(
    ("moved", "with_d"),
    [
        pytest.param(False, False, id="link", marks=pytest.mark.full),
        pytest.param(True, True, id="other path and -d"),
        pytest.param(False, True, id="link and -d", marks=pytest.mark.full),
        pytest.param(True, False, id="other path", marks=pytest.mark.full),
    ],
)
def test_home_is_accessible_by_all_its_paths(moved_home, guest, moved, with_d):
    """Submit the job from the path that getcwd(3) returns."""
    home = guest.home
    if moved:  # the guest has it below /home
        run("usermod", "-d", str(moved_home), guest.user)
    else:
        home.symlink_to(moved_home)
    account = pwd.getpwnam(guest.user)
    sub = moved_home / "sub"
    sub.mkdir()
    (sub / "in").write_text("in\n")
    (sub / "job.sh").write_text(SHOW_NAMES.replace("NAMES", f"{moved_home} {home}"))
    for path in (sub, *sub.iterdir()):
        os.chown(path, account.pw_uid, account.pw_gid)
    args = ("vsub", "-W", "block=true", "-j", "oe", "-o", "out", "-vm", "ram=256M")
    more, place = (("-d", str(sub)), f"{home}/sub") if with_d else ((), home)
    done = guest.as_user(*args, *more, "job.sh", cwd=sub, check=False)
    said = (sub / "out").read_text() if (sub / "out").exists() else ""
    assert (done.returncode, done.stderr) == (0, b""), said
    each = f"{home}/sub in work"
    assert said.splitlines() == [f"{home} {place} {home}", each, each]
    assert (sub / "made").read_text() == "work\n"


def test_home_link_owned_by_the_user_is_refused(moved_home, guest):
    """The job's error names the link and the setting."""
    account = pwd.getpwnam(guest.user)
    guest.home.symlink_to(moved_home)
    os.lchown(guest.home, account.pw_uid, account.pw_gid)
    result = guest.job("#!/bin/sh\necho ran\n", "-vm", "ram=256M")
    assert (result.code, result.out) == (122, b"")
    assert f"cannot share {guest.home}: {guest.home} is a symbolic link" in result.err.decode()
    assert b"[shares]" in result.err
