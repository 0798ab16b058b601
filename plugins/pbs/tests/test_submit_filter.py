"""Torque's submit filter: which scripts it changes, and its installation."""

import functools
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pbs_harness import TorqueHarness, apply_steps, undo_steps
from vtorque_core.api import HostFault
from vtorque_core.api.batch_system import Needs
from vtorque_core.api.setup_steps import Installation
from vtorque_pbs.torque import submit_filter
from vtorque_testing.batch_node import tree
from vtorque_testing.submit import run_vsub

BLOB = b'{"v":1}'
NEEDS = Needs(4, 2304, 60)
SCRIPT = b"#!/bin/sh\n#PBS -N name\n#VSUB -vm ram=2G\n\n# a comment\necho\n"
ADDED = (
    "#PBS -S {shell}\n#PBS -l nodes=1:ppn=4:vtorque\n#PBS -l mem=2304mb\n"
    "#PBS -l other=vt1:AHsidiI6MX0\n"
)


@pytest.fixture
def harness(tmp_path):
    return TorqueHarness(tmp_path)


def filtered(harness, argv, content):
    return run_vsub(harness, ["--filter", *argv], stdin=content, blob=BLOB, needs=NEEDS)


@pytest.mark.parametrize("argv", [[], ["-N", "x", "-q", "batch", "job.sh"], ["-l", "walltime=1"]])
def test_lines_for_the_vm_job_end_the_directives(harness, argv):
    done = filtered(harness, argv, SCRIPT)
    added = ADDED.format(shell=harness.paths.jobshell)
    assert (done.code, done.stdout.decode()) == (0, SCRIPT.decode().replace("echo", added + "echo"))


@pytest.mark.parametrize(
    ("argv", "clash"),
    [
        (["-S", "/bin/bash"], "-S"),
        (["-l", "nodes=1:ppn=2,walltime=1:00:00"], "-l nodes=1:ppn=2:vtorque"),
        (["-lmem=1gb"], None),
    ],
)
def test_command_line_that_would_replace_the_lines_is_refused(harness, argv, clash):
    done = filtered(harness, argv, SCRIPT)
    if clash is None:  # the job requests memory, so no line is needed
        assert done.code == 0
        assert b"-l mem" not in done.stdout
        return
    assert done.code == 2
    assert done.stdout == b""
    assert b"submit with vsub" in done.stderr
    assert clash.encode() in done.stderr


def test_bare_metal_script_is_not_changed(harness):
    content = SCRIPT.replace(b"ram=2G", b"none")
    done = run_vsub(harness, ["--filter"], stdin=content, blob=None, needs=None)
    assert (done.code, done.stdout) == (0, content)


# -- the program ----------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return an installation whose filter is compiled once in a test."""
    monkeypatch.setattr(submit_filter, "build", functools.cache(submit_filter.build))
    vsub = tmp_path / "vsub"
    vsub.write_text('#!/bin/sh\necho "$#:$*"; sed s/^/+/\n')
    vsub.chmod(0o755)
    return Installation(tmp_path / "vtorque", tmp_path / "v.toml", tmp_path / "shell")


def run(path, content, *argv, env=None):
    return subprocess.run([path, *argv], input=content, capture_output=True, env=env, check=False)


def install(tmp_path, place):
    for step in submit_filter.steps(tmp_path, place):
        if not step.is_applied():
            step.apply()
        assert step.is_applied()
    return tmp_path / submit_filter.NAME


PLAIN = [
    b"",
    b"#!/bin/sh\necho\n",
    b"#!/bin/sh\n#PBS -N x\n  #VSUB -vm a=1\n\\t \\\n \ttext\n#VSUB -vm ram=1G\n\n",
    b"#!/bin/sh\n#PBS -N no-newline",
    b"#VSUBX\n\xff\xfe\nx",
    b"#!/bin/sh\n" + b"echo \\\n #VSUB -vm a=1\n" * 35,
    b"#!/bin/sh\r\n\r\n#VSUB -vm a=1\r\n",
    b"#\0\n:\0\0\n\0#VSUB -vm a=1",
    b"#VSUB",
    b"#!/bin/sh\necho\n" * 60 + b"#VSUB -vm ram=1G\nno newline",
    b"#!/bin/sh\n" + bytes(range(256)) * 1000 + b"\n#VSUB -vm a=1",
]


def test_script_without_vsub_lines_passes_unchanged_without_a_program(tmp_path, place):
    """Each program costs every plain job a millisecond."""
    path = install(tmp_path, place)
    (tmp_path / "vsub").unlink()
    for content in PLAIN:
        done = run(path, content, "-q", "a b", env={"PATH": "/nowhere"})
        assert (done.returncode, done.stdout, done.stderr) == (0, content, b"")


def test_filter_is_a_static_program(tmp_path, place):
    """A shell takes longer to start, and reads a pipe byte by byte."""
    kinds = subprocess.run(
        ["readelf", "-lW", install(tmp_path, place)], capture_output=True, text=True, check=True
    ).stdout
    assert "LOAD" in kinds
    assert "INTERP" not in kinds


def test_script_that_cannot_be_written_is_rejected(tmp_path, place):
    path = install(tmp_path, place)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [path], input=b"x\n", stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 255
    assert b"cannot write the script: No space left on device" in done.stderr


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_script_with_vsub_lines_goes_through_vsub(tmp_path, place, end):
    content = b"#!/bin/sh\n#PBS -N x\n#VSUB -vm a=1\necho \\\n last" + end
    done = run(install(tmp_path, place), content, "-q", "a b", "job.sh")
    changed = b"".join(b"+" + line for line in content.splitlines(keepends=True))
    assert (done.returncode, done.stdout) == (0, b"4:--filter -q a b job.sh\n" + changed)
    (tmp_path / "vsub").write_text("#!/bin/sh\necho no >&2; exit 2\n")
    for text in (content, content * 20000):  # more than a pipe holds
        done = run(tmp_path / submit_filter.NAME, text)
        assert (done.returncode, done.stdout, done.stderr) == (255, b"", b"no\n")
    (tmp_path / "vsub").unlink()
    done = run(tmp_path / submit_filter.NAME, content)
    assert done.returncode == 255
    assert f"{tmp_path}/vsub: No such file".encode() in done.stderr


def test_line_before_the_first_command_is_found(tmp_path, place):
    path = install(tmp_path, place)
    for lines in (b"#VSUB\t-vm a=1", b"\n:\n# a\n#VSUB -vm a=1\r\n\0", b"#VSUB "):
        assert run(path, lines).stdout == b"1:--filter\n+" + lines.replace(b"\n", b"\n+")


@pytest.mark.parametrize(
    "before", [None, b"", b"# mine\nSERVERHOST a", b"SUBMITFILTER /a b\nX y\n"]
)
def test_setup_is_undone_byte_for_byte(tmp_path, place, before):
    config = tmp_path / "torque.cfg"
    if before is not None:
        config.write_bytes(before)
    for _ in range(2):
        install(tmp_path, place)
    assert config.read_bytes().count(b"\nSUBMITFILTER ") == 1
    for step in reversed(submit_filter.steps(tmp_path, place)):
        step.undo()
    assert (config.read_bytes() if config.exists() else None) == before
    assert not (tmp_path / submit_filter.NAME).exists()


@pytest.fixture
def chained(tmp_path, place):
    """Return the filter, and the site's, which runs first."""
    site = tmp_path / "site filter"
    site.write_text('#!/bin/sh\ncat; echo "#VSUB -vm from=$1"; exit ${CODE-0}\n')
    site.chmod(0o755)
    path = tmp_path / "filter"
    path.write_bytes(submit_filter.build(place, site))
    path.chmod(0o755)
    return path, site


def test_filter_of_the_site_runs_first_and_may_refuse(tmp_path, chained):
    """qsub ignores the output of a filter that fails (set_script_file in qsub_functions.c)."""
    path, site = chained
    done = run(path, b"#!/bin/sh\n", "-x")
    assert (done.returncode, done.stdout) == (0, b"2:--filter -x\n+#!/bin/sh\n+#VSUB -vm from=-x\n")
    for code in (255, 3):
        site.write_text(f"#!/bin/sh\ncat; exit {code}\n")
        assert run(path, b"#!/bin/sh\n", "-x").returncode == code
    site.write_text("#!/bin/sh\ncat\n")
    (tmp_path / "vsub").write_text("#!/bin/sh\necho no >&2; exit 2\n")
    done = run(path, b"#!/bin/sh\n#VSUB -vm a=1\n")
    assert (done.returncode, done.stderr) == (255, b"no\n")
    assert run(path, b"#!/bin/sh\n").returncode == 0
    site.unlink()
    assert run(path, b"#!/bin/sh\ntrue\n").stdout == b"#!/bin/sh\ntrue\n"


def test_script_without_vsub_lines_is_that_of_the_sites_filter(chained):
    path, site = chained
    site.write_text("#!/bin/sh\necho '# site'; cat\n")
    for content in PLAIN:
        done = run(path, content, "-q", "a b")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"# site\n" + content, b"")


def test_filter_in_torque_cfg_is_kept(tmp_path, place):
    (tmp_path / "torque.cfg").write_text("SUBMITFILTER /usr/bin/env\n")
    path = install(tmp_path, place)
    assert b"/usr/bin/env" in path.read_bytes()
    assert Path("/usr/bin/env") == submit_filter._site_filter(tmp_path / "torque.cfg", path)


def test_setup_without_compiler_says_what_to_install(tmp_path, place, monkeypatch):
    install(tmp_path, place)
    monkeypatch.setattr(submit_filter, "build", submit_filter.build.__wrapped__)  # not the cache
    monkeypatch.setenv("PATH", "/nowhere")
    check, *rest = submit_filter.steps(tmp_path, place)
    assert "install gcc" in check.problem
    with pytest.raises(HostFault, match="install gcc"):
        check.apply()
    for step in reversed(rest):
        step.undo()
    assert not (tmp_path / submit_filter.NAME).exists()
    source = tmp_path / "filter.c"
    source.write_text("int a = ;\n")
    monkeypatch.undo()
    monkeypatch.setattr(submit_filter, "_SOURCE", source)
    assert "gcc could not compile" in submit_filter.steps(tmp_path, place)[0].problem


def test_default_filter_below_torques_prefix_is_kept(tmp_path):
    for name in ("bin/qsub", "libexec/qsub_filter"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch(mode=0o755)
    found = submit_filter._site_filter(tmp_path / "cfg", tmp_path / "ours", str(tmp_path / "bin"))
    assert found == tmp_path / "libexec/qsub_filter"


@pytest.mark.root
@pytest.mark.parametrize("end", ["", "\n"])
def test_uninstall_restores_a_site_with_its_own_filter_and_hooks(harness, end):
    """All steps of a node, twice in a row: the site's files keep their bytes and modes."""
    root = harness.setup_root()
    own = root / "site-filter"
    own.write_text("#!/bin/sh\nsed s/a/b/\n")
    own.chmod(0o751)
    config = root / "spool/torque.cfg"
    config.write_text(f"QSUBSLEEP 2\n SUBMITFILTER {own} # of the site\nQSUBHOST h{end}")
    node = harness.adapter_of("n1")
    node._settings = replace(node._settings, submit_filter=True)
    (root / "bin").mkdir()
    place = Installation(root / "bin/vtorque", root / "vtorque.toml", root / "bin/jobshell")
    before = tree(root)
    for _ in range(2):
        apply_steps(node, place)
        assert b"\n#vtorque#  SUBMITFILTER " in config.read_bytes()
        assert str(own).encode() in (root / "bin" / submit_filter.NAME).read_bytes()
        undo_steps(node, place)
        assert tree(root) == before
