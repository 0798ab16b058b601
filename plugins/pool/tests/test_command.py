"""``vtorque pool`` with the driver static; Slurm's commands are doubles."""

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from recorded_command import RecordedCommand
from vtorque_core.api import HostFault, Refused
from vtorque_pool import programs
from vtorque_pool.command import pool

CONFIG = """
[paths]
state = "{top}/vtorque"
run = "{top}/run"

[plugin.pool]
state = "{top}/state"
log = "{top}/log"
bindir = "{top}/bin"
slurm_conf = "{top}/slurm.conf"
textfile = "{top}/pool.prom"

[plugin.pool.clouds.own]
driver = "static"
machines = "n[1-2]"
state = "{top}/static"

[[plugin.pool.shapes]]
name = "big"
nodes = "n[1-3]"
cloud = "own"
price = 0.25
"""
NODES = b"NodeName=n1 State=IDLE+CLOUD LastBusyTime=2026-11-23T16:01:00\nNodeName=n9 State=IDLE\n"


class CommandSite:
    def __init__(self, top):
        self.top = top
        self.config = top / "vtorque.toml"
        self.config.write_text(CONFIG.format(top=top))
        (top / "slurm.conf").write_text("ClusterName=x\n")
        self.scontrol = RecordedCommand(top / "bin" / "scontrol")
        RecordedCommand(top / "bin" / "squeue")
        self.scontrol.say(NODES)

    def run(self, *words):
        """Return a command's output; raise its error."""
        given = [*words, "--config", str(self.config)]
        done = CliRunner().invoke(pool, given, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    def program(self, *words):
        return programs.main([*words, "--config", str(self.config)])


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "begin", lambda: None)  # of a process, and this one is pytest's
    return CommandSite(tmp_path)


def test_resume_and_suspend_programs_create_and_end_machines(site):
    assert site.program("resume", "n[1-3]") == 1  # no machine is n3
    assert "update nodename=n3 state=DOWN reason=vtorque-pool: the quota of own is used up" in (
        site.scontrol.calls()
    )
    assert sorted(p.name for p in (site.top / "static").iterdir()) == ["n1.json", "n2.json"]
    assert site.program("suspend", "n[1-2]") == 0
    assert list((site.top / "static").iterdir()) == []
    assert "n2: created n2 (Slurm resumes it)" in (site.top / "log").read_text()


@pytest.mark.parametrize("nodes", ["n[1-", "$(reboot)", ""])
def test_invalid_node_lists_change_nothing(site, nodes, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "logger", lambda _: lambda _: None)
    assert site.program("resume", nodes) == 1
    assert site.scontrol.calls() == []


def test_nodes_are_listed_with_age_idle_time_and_cost(site):
    site.program("resume", "n1")
    text = site.run()
    assert "n1" in text and "free" in text and "0.250" in text and "n9" not in text
    [row] = json.loads(site.run("--json"))["nodes"]
    assert (row["node"], row["state"], row["machine"]) == ("n1", "free", "n1")
    assert row["age"] >= 0 and row["idle"] > 0
    metrics = site.run("--metrics")
    assert 'vtorque_pool_nodes{shape="big",state="free"} 1\n' in metrics
    assert 'vtorque_pool_starts_total{shape="big"} 1\n' in metrics


def test_held_node_is_listed_and_kept_until_destroyed(site):
    site.program("resume", "n1")
    site.run("hold", "n1", "--why", "odd \x1b[31mnoise")
    assert "hold" in site.run() and "\x1b" not in site.run()
    site.program("suspend", "n1")
    assert (site.top / "static" / "n1.json").exists()
    site.run("destroy", "n1")
    assert not (site.top / "static" / "n1.json").exists()
    assert "update nodename=n1 state=POWER_DOWN_FORCE" in site.scontrol.calls()


def test_drain_waits_for_running_jobs(site):
    site.run("drain", "n1")
    assert "update nodename=n1 state=POWER_DOWN_ASAP" in site.scontrol.calls()


def test_node_outside_the_pool_is_refused(site):
    for words in (("drain", "n9"), ("hold", "n["), ("release", "small")):
        with pytest.raises(Refused):
            site.run(*words)
    assert site.scontrol.calls() == []


def test_unreachable_batch_system_is_a_fault_and_ends_no_machine(site):
    site.program("resume", "n1")
    site.scontrol.say(err="slurm_load_node error: Unable to contact slurm controller", code=1)
    with pytest.raises(HostFault, match="Unable to contact"):
        site.run("tidy")
    assert (site.top / "static" / "n1.json").exists()


def test_lines_for_slurm_conf_are_printed(site):
    lines = site.run("config").splitlines()
    assert f"ResumeProgram={site.top}/vtorque-pool/resume" in lines
    assert "NodeName=n[1-3] State=CLOUD CPUs=1 RealMemory=2048" in lines
    assert "PrivateData=cloud" in lines


@pytest.mark.root
@pytest.mark.parametrize(
    ("words", "streams", "code", "said"),
    [
        ("--help", ">/dev/full", 1, "vtorque-pool: standard output: No space left on device\n"),
        ("--help", ">&- 2>&-", 0, ""),
        ("resume $'x\\xff\\e[2J'", "", 1, r"vtorque-pool: resume x\\xff\\x1b\[2J: .*\n"),
        ("resume n1", "2>/dev/full", 1, ""),
        ("resume n1", "<&- >&- 2>&-", 1, ""),
    ],
)
def test_program_of_slurm_with_odd_streams_or_words_shows_no_traceback(
    site, words, streams, code, said
):
    site.config.write_text("")
    program = f"{sys.executable} -I -m vtorque_pool.programs --config {site.config} {words}"
    done = subprocess.run(
        ["/bin/bash", "-c", f"{program} {streams}"], capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, b"")
    assert re.fullmatch(said, done.stderr.decode())
