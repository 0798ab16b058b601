"""``vmgr report`` for its user, and the summary at the end of a job's error output."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import forked
import kept_data
from vtorque_core.api import Paths, hooks
from vtorque_core.cli.vmgr import main
from vtorque_report import figures, load, plots, plugin, text
from vtorque_testing.planned import PlannedNode, load_with_core

BIN = Path(sys.executable).parent


@pytest.fixture
def site(tmp_path):
    """Return a site config whose ``state`` has job 42.srv of this user and 43.srv of another."""
    paths = Paths(tmp_path / "state", tmp_path / "run")
    own = paths.kept / str(os.getuid()) / "42.srv.0"
    kept_data.make(own, seconds=40.0, guests=2)
    kept_data.make(paths.kept / str(os.getuid() + 1) / "43.srv.0", job="43.srv", seconds=40.0)
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{paths.state}"\nrun = "{paths.run}"\n')
    return SimpleNamespace(config=config, own=own)


def vmgr(site, *argv, **environ):
    environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | environ
    called = ["vmgr", "--config", str(site.config), "report", *argv]
    return forked.call(without_plots, called, environ, site.config.parent)


def without_plots():
    """Run as without vl-convert: it has threads, which a fork of the tests may lack."""
    sys.modules["vl_convert"] = None
    main()


def test_summary_fits_on_a_screen_without_a_terminal(site):
    done = vmgr(site, "42.srv")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == ""
    assert len(lines) <= 35 and max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    assert lines[0] == "Job 42.srv (crystal): ended, exit code 0".ljust(len(lines[0]))
    for word in ("CPU", "steal", "emulator", "memory", "disk", "network", "boot", "run", "1 vn1-1"):
        assert f"\n{word} " in done.stdout, word
    assert "request ram=" in done.stdout and "█" in done.stdout


def test_encoding_without_bars_is_not_an_error(site):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="latin-1")
    load.tolerate(out)
    text.show(load.report([site.own], 0.0), out)
    out.flush()
    assert b"CPU       ????" in raw.getvalue()


@pytest.mark.parametrize(("variable", "coloured"), [("", True), ("1", False)])
def test_colours_on_a_terminal_only(site, variable, coloured):
    leader, terminal = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {
        "TERM": "xterm-256color", "COLUMNS": "100",
    }  # fmt: skip
    if variable:
        environ["NO_COLOR"] = variable
    command = [BIN / "vmgr", "--config", site.config, "report", "42.srv"]
    with subprocess.Popen(command, stdout=terminal, env=environ) as job:
        os.close(terminal)
        said = b""
        try:
            while part := os.read(leader, 1 << 16):
                said += part
        except OSError:  # EIO: the other end is closed
            pass
    os.close(leader)
    assert job.returncode == 0
    assert bool(re.search(rb"\x1b\[[0-9;]*3[1-7]", said)) == coloured


def test_user_text_does_not_control_a_terminal(tmp_path):
    bad = "[bold red]x[/] \x1b[31m :smile:"
    kept_data.make(tmp_path, seconds=10.0, guests=2, name=bad, node=bad, image=bad, owner=bad)
    out = io.StringIO()
    text.show(load.report([tmp_path], 0.0), out)
    assert "\x1b" not in out.getvalue()
    assert "[bold red]x[/] \\x1b[31m :smile:" in " ".join(out.getvalue().split())


def test_many_guests_are_cut_with_a_note(tmp_path):
    out = io.StringIO()
    text.show(load.report([kept_data.make(tmp_path, seconds=4.0, guests=40)], 0.0), out)
    assert "... 28 more: --json" in out.getvalue()
    assert len(out.getvalue().splitlines()) < 50


def test_command_is_listed_and_completed(site):
    environ = os.environ | {
        "_VMGR_COMPLETE": "bash_complete", "COMP_CWORD": "3",
        "COMP_WORDS": f"vmgr --config {site.config} rep",
    }  # fmt: skip
    done = subprocess.run([BIN / "vmgr"], capture_output=True, text=True, env=environ, check=False)
    assert done.stdout == "plain,report\n"


def test_json_has_all_figures(site):
    data = json.loads(vmgr(site, "42.srv", "--json").stdout)
    assert data["total"]["vcpus"] == 8 and len(data["guests"]) == 2
    assert data["state"] == "ended, exit code 0"


def test_page_without_plots_is_written_with_a_note(site, tmp_path):
    page = tmp_path / "page.html"
    done = vmgr(site, "42.srv", "--html", str(page))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"vmgr report: {page} is without plots, ")
    assert done.stderr.endswith("in a checkout: scripts/wheels WHEELS 'report[html]')\n")
    assert f"{sys.prefix}/bin/pip install --no-index" in done.stderr
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert vmgr(site, "42.srv", "--html", "-").stdout == page.read_text()


def test_disk_figures_note_that_shares_are_not_counted(site):
    assert re.search(r"(?m)^disk .* written [^,]*,\s+without shared", vmgr(site, "42.srv").stdout)


def test_memory_is_labeled_as_that_of_qemu():
    found = figures.Figures(ram=4 << 30, memory=float(1 << 30))
    assert dict(zip(text.HEADS, text.cells(found), strict=True))["QEMU memory"] == "1.0 GiB"
    ((_, _, said),) = text.shares(found)
    assert said.startswith("QEMU used at most")


@pytest.mark.full  # the browser's tests create one, too
def test_page_is_written(site, tmp_path):
    page = tmp_path / "page.html"
    argv = [BIN / "vmgr", "--config", site.config, "report", "42.srv", "--html", page]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert page.read_text().lstrip().startswith("<!DOCTYPE html>")


def test_records_of_another_node_are_added(site, tmp_path):
    other = kept_data.make(tmp_path / "n2", seconds=40.0, node="n2", nodes=["n1", "n2"])
    data = json.loads(vmgr(site, "42.srv", "--json", "--from", str(other)).stdout)
    assert data["nodes"] == ["n1", "n2"] and len(data["guests"]) == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [(("44.srv",), "this node has no records of a job 44.srv"), ((), "name a job"),
     (("42.srv", "--from", "/"), "/: No such file"), (("42.srv", "--html", "/no/p"), "/no/p: No")],
)  # fmt: skip
def test_invalid_arguments_print_one_line(site, argv, said):
    done = vmgr(site, *argv)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


# -- [plugin.report] show --------------------------------------------------------------------------


PATIENT = """
import runpy, signal; signal.alarm = lambda _: 0  # however busy the machine is
runpy.run_module({!r}, run_name="__main__")
"""


def commands(show, directory):
    plugins = load_with_core("report", plugin)
    place = SimpleNamespace(directory=directory)
    site = PlannedNode.make(plugins, f"[plugin.report]\nshow = {show}\n").site
    found = plugins.collect(hooks.vtorque_after_script, place=place, code=7, site=site)
    return [contribution.item for contribution in found]


def test_summary_is_printed_at_the_end_of_the_error_output_if_configured(tmp_path):
    kept_data.make(tmp_path, seconds=40.0, ended=None, status="")
    assert commands("false", tmp_path) == []
    ((python, isolated, _, module, *args),) = commands("true", tmp_path)
    argv = [python, isolated, "-c", PATIENT.format(module), *args]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={})
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == ""
    assert lines[0] == "vtorque: Job 42.srv (crystal): script ended, exit code 7"
    assert all(line.startswith("vtorque:") and "\x1b" not in line for line in lines)
    assert len(lines) < 40


def test_summary_without_records_is_empty(tmp_path):
    (argv,) = commands("true", tmp_path)
    assert subprocess.run(argv, capture_output=True, check=False).stdout == b""


def test_blocked_summary_ends_by_a_timeout(tmp_path):
    """The case of a job shell that is killed: no process waits, and no process reads."""
    kept_data.make(tmp_path, seconds=40.0)
    (argv,) = commands("true", tmp_path)
    read, write = os.pipe()
    os.set_blocking(write, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    done = subprocess.run(argv, stdout=write, stderr=subprocess.DEVNULL, check=False, timeout=180)
    os.close(read)
    os.close(write)
    assert done.returncode == -14  # SIGALRM


def test_migrations_and_pauses_are_shown(tmp_path):
    """The summary and the page show both; the page shows no unknown name."""
    names = ("arrives", "run", "paused", "run", "suspended", "run", "moves", "<b>")
    marks = [
        {"name": name, "start": kept_data.START + at, "seconds": 1.0, "guest": None}
        for at, name in enumerate(names)
    ]
    found, out = (
        load.report([kept_data.make(tmp_path, telemetry=False, phases=marks)], 0.0),
        io.StringIO(),
    )
    text.show(found, out)
    for name in names[:-1]:
        assert f"\n{name} " in out.getvalue()
    (attempt,) = found.attempts
    rows = [name for name, *_ in plots._rows(attempt.phases, {})]
    assert rows == [*names[:-1], "other"]
