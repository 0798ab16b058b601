"""``vtorque setup`` installs the commands for users, and removes only its own files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vtorque_admin import setup_commands
from vtorque_core.base.names import Paths

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


def install(top, modulefiles="", **how):
    said = []
    setup_commands.install(f"{top}/bin", modulefiles, said.append, **how)
    return said


def uninstall(top, modulefiles=""):
    said = []
    setup_commands.uninstall(f"{top}/bin", modulefiles, said.append)
    return said


def entries_below(top):
    """Return every file and link below, relative."""
    return sorted(str(p.relative_to(top)) for p in top.rglob("*") if p.is_symlink() or p.is_file())


ALL = sorted(["bin/vmgr", "bin/vsub", "bin/vtorque", *(f"share/{each}" for each in SHARED)])


def test_commands_and_completion_are_installed_once_and_removed(top):
    assert len(install(top)) == len(ALL)
    assert entries_below(top) == ALL
    assert (top / "bin" / "vsub").readlink() == OWN / "vsub"
    assert install(top) == []
    assert len(uninstall(top)) == len(ALL)
    assert entries_below(top) == []
    assert uninstall(top) == []


def test_dry_run_changes_nothing(top):
    said = install(top, dry_run=True)
    assert said[0] == f"would link {top}/bin/vsub to {OWN}/vsub"
    assert len(said) == len(ALL) and entries_below(top) == []


def test_empty_commands_key_installs_nothing(top, monkeypatch):
    monkeypatch.chdir(top)
    setup_commands.install("", str(top), pytest.fail)
    setup_commands.uninstall("", str(top), pytest.fail)
    assert entries_below(top) == []


@pytest.mark.parametrize("kind", ["file", "empty", "link", "dangling", "directory", "fifo"])
@pytest.mark.parametrize("name", ["bin/vsub", "share/zsh/site-functions/_vmgr"])
def test_foreign_file_is_kept_and_reported(top, kind, name):
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
    assert install(top) == [warning], "not exactly this file is missing"
    told = uninstall(top)
    assert not any(line == f"removed {path}" for line in told)
    assert len([line for line in told if line.startswith("removed ")]) == len(ALL) - 1
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (
        before.st_ino,
        before.st_mode,
        before.st_mtime_ns,
    )


def test_files_of_an_older_version_are_replaced(top):
    install(top)
    file = top / "share" / SHARED[0]
    now = file.read_bytes()
    mark = f"# Written by vTorque setup install of {sys.prefix}\n".encode()
    assert now.endswith(mark)
    file.write_bytes(b"# older\n" + mark)
    assert install(top) == [f"write {file}"]
    assert file.read_bytes() == now
    file.write_bytes(b"# other\n# Written by vTorque setup install of /opt/other\n")
    assert install(top) == [
        f"warning: {file} exists and belongs to another installation: not changed"
    ]


def test_directory_that_others_can_write_is_skipped_and_reported(top):
    (top / "bin").chmod(0o777)
    said = install(top)
    assert len([line for line in said if "can be written by others" in line]) == 3
    assert [each for each in entries_below(top) if each.startswith("bin/")] == []


def test_commands_in_the_same_directory_need_no_link(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(setup_commands.sys, "prefix", str(tmp_path))
    install(tmp_path)
    assert [each for each in entries_below(tmp_path) if each.startswith("bin/")] == []


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


def test_zsh_and_fish_completion_files_are_installed(top):
    install(top)
    assert (top / "share/zsh/site-functions/_vmgr").read_text().startswith("#compdef vmgr\n")
    assert (
        "complete --no-files --command vmgr"
        in (top / "share/fish/vendor_completions.d/vmgr.fish").read_text()
    )


def test_default_directory_is_usr_local_bin():
    assert Paths().commands == "/usr/local/bin"


def test_modulefiles_are_installed_and_removed(top):
    modules = top / "modules"
    said = install(top, str(modules))
    assert said[-2:] == [f"write {modules}/vtorque", f"write {modules}/vtorque.lua"]
    tcl, lua = (modules / name for name in ("vtorque", "vtorque.lua"))
    assert tcl.read_text().startswith("#%Module1.0\n")
    assert f"prepend-path PATH {top}/bin\n" in tcl.read_text()
    assert f'prepend_path("PATH", "{top}/bin")\n-- # Written by' in lua.read_text()
    assert install(top, str(modules)) == []
    tcl.write_text("#%Module1.0\n")
    lua.write_text("older\n" + lua.read_text().splitlines()[-1] + "\n")
    assert install(top, str(modules)) == [
        f"warning: {tcl} exists and belongs to another installation: not changed",
        f"write {lua}",
    ]
    uninstall(top, str(modules))
    assert entries_below(top) == ["modules/vtorque"]


@pytest.mark.parametrize("name", ["bin", 'with "all" [of] ${them} {'])
def test_tcl_modulefile_prepends_to_path(tmp_path, name):
    """Doubles replace the commands of Environment Modules; a real tclsh runs the file."""
    directory = tmp_path / name
    directory.mkdir()
    setup_commands.install(str(directory), str(tmp_path / "m"), lambda _line: None)
    script = (
        "proc module-whatis {text} {}\nproc prepend-path {name value} {puts $name=$value}\n"
        f"source {tmp_path}/m/vtorque\n"
    )
    done = subprocess.run(["tclsh"], input=script, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"PATH={directory}\n", "")
