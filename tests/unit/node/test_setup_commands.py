"""``vtorque setup`` gives users the commands, and takes nothing that is not its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vtorque_core.base.names import Paths
from vtorque_core.node.admin import setup_commands

OWN = Path(sys.prefix, "bin")
SHARED = [
    "bash-completion/completions/vmgr",
    "bash-completion/completions/vtorque",
    "fish/vendor_completions.d/vmgr.fish",
    "fish/vendor_completions.d/vtorque.fish",
    "zsh/site-functions/_vmgr",
    "zsh/site-functions/_vtorque",
]


@pytest.fixture
def top(tmp_path):
    """A directory in the place of /usr/local."""
    (tmp_path / "bin").mkdir()
    return tmp_path


def install(top, **how):
    said = []
    setup_commands.install(f"{top}/bin", said.append, **how)
    return said


def uninstall(top):
    said = []
    setup_commands.uninstall(f"{top}/bin", said.append)
    return said


def there(top):
    """Return every file and link below, relative."""
    return sorted(str(p.relative_to(top)) for p in top.rglob("*") if p.is_symlink() or p.is_file())


ALL = sorted(["bin/vmgr", "bin/vsub", "bin/vtorque", *(f"share/{each}" for each in SHARED)])


def test_commands_and_completion_are_made_once_and_taken_back(top):
    assert len(install(top)) == len(ALL)
    assert there(top) == ALL
    assert (top / "bin" / "vsub").readlink() == OWN / "vsub"
    assert install(top) == []
    assert len(uninstall(top)) == len(ALL)
    assert there(top) == []
    assert uninstall(top) == []


def test_a_dry_run_changes_nothing(top):
    said = install(top, dry_run=True)
    assert said[0] == f"would link {top}/bin/vsub to {OWN}/vsub"
    assert len(said) == len(ALL) and there(top) == []


def test_an_empty_key_is_nowhere(top, monkeypatch):
    monkeypatch.chdir(top)
    setup_commands.install("", pytest.fail)
    setup_commands.uninstall("", pytest.fail)
    assert there(top) == []


@pytest.mark.parametrize("kind", ["file", "empty", "link", "dangling", "directory", "fifo"])
@pytest.mark.parametrize("name", ["bin/vsub", "share/zsh/site-functions/_vmgr"])
def test_what_is_not_ours_is_left_and_told(top, kind, name):
    path = top / name
    path.parent.mkdir(parents=True, exist_ok=True)
    {
        "file": lambda: path.write_text("#!/bin/sh\n"),
        "empty": path.touch,
        "link": lambda: path.symlink_to("/bin/true"),
        "dangling": lambda: path.symlink_to("/opt/other/bin/vsub"),
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
    }[kind]()
    before = path.lstat()
    (warning,) = [line for line in install(top) if line.startswith("warning: ")]
    assert str(path) in warning
    assert install(top) == [warning], "the others are there"
    told = uninstall(top)
    assert not any(line == f"removed {path}" for line in told)
    assert len([line for line in told if line.startswith("removed ")]) == len(ALL) - 1
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (
        before.st_ino,
        before.st_mode,
        before.st_mtime_ns,
    )


def test_files_of_an_older_version_are_renewed_and_of_another_installation_are_not(top):
    install(top)
    file = top / "share" / SHARED[0]
    now = file.read_bytes()
    mark = f"# Written by vTorque setup install of {sys.prefix}\n".encode()
    assert now.endswith(mark)
    file.write_bytes(b"# older\n" + mark)
    assert install(top) == [f"write {file}"]
    assert file.read_bytes() == now
    file.write_bytes(b"# other\n# Written by vTorque setup install of /opt/other\n")
    assert install(top) == [f"warning: {file} is there and not this installation's: left as it is"]


def test_a_directory_that_others_can_write_gets_nothing_and_is_told(top):
    (top / "bin").chmod(0o777)
    said = install(top)
    assert len([line for line in said if "can be written by others" in line]) == 3
    assert [each for each in there(top) if each.startswith("bin/")] == []


def test_where_the_commands_are_already_they_need_no_link(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(setup_commands.sys, "prefix", str(tmp_path))
    install(tmp_path)
    assert [each for each in there(tmp_path) if each.startswith("bin/")] == []


def test_bash_completes_the_linked_command(top):
    install(top)
    script = (
        f". {top}/share/bash-completion/completions/vmgr; COMP_WORDS=(vmgr im); COMP_CWORD=1;"
        '_vmgr_completion vmgr; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environ = {"PATH": f"{top}/bin:/usr/bin:/bin", "HOME": str(top)}
    done = subprocess.run(
        ["bash", "-c", script], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("images\n", "")


def test_zsh_and_fish_find_theirs(top):
    install(top)
    assert (top / "share/zsh/site-functions/_vmgr").read_text().startswith("#compdef vmgr\n")
    assert (
        "complete --no-files --command vmgr"
        in (top / "share/fish/vendor_completions.d/vmgr.fish").read_text()
    )


def test_the_default_is_where_every_users_path_leads():
    assert Paths().commands == "/usr/local/bin"
