"""Start of root's programs: isolated, only code owned by root, fixed environment, umask 077."""

from __future__ import annotations

import ast
import gc
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vtorque_admin import setup_batch
from vtorque_core.api.setup_steps import Installation, make_directories
from vtorque_core.base import trust
from vtorque_core.base.errors import ConfigError
from vtorque_local import become_job

REPO = Path(__file__).resolve().parents[3]
PLACE = Installation(
    Path("/opt/v/bin/vtorque"), Path("/etc/v.toml"), Path("/shell"),
    python=Path("/opt/v/bin/python3"),
)  # fmt: skip
FIXED = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
HOSTILE = {
    "PATH": "/x", "HOME": "/x", "LD_DEBUG_OUTPUT": "/x", "LIBVIRT_LOG_OUTPUTS": "1:file:/x",
    "GCONV_PATH": "/x", "IFS": "/", "TMPDIR": "/x", "LC_ALL": "C", "BASH_ENV": "/x",
    "PYTHONPATH": "/x", "PBS_JOBID": "1.x",
}  # fmt: skip
# Act as a program of root, also if the test is not root, and print the result. With "control", the
# program does not isolate itself.
PROBE = """
import json, os, sys
def say(*what):
    print(json.dumps([*what, dict(os.environ), os.umask(0)]))
    sys.exit()
os.geteuid, os.execve = (lambda: 0), (lambda path, argv, environ: say(argv, environ))
os.umask(0o002)
from vtorque_core.base import trust
if os.getuid():
    trust.require_own_code = lambda: None
if sys.argv[1] != "control":
    from vtorque_core.cli.entry import secure_process
    secure_process("vtorque_core.cli.vtorque")
say()
"""


def began(*words: str, isolated: bool = True) -> list:
    mode = ["-I"] if isolated else []
    argv = [sys.executable, *mode, "-c", PROBE, *words]
    done = subprocess.run(argv, env=HOSTILE, capture_output=True, check=True, timeout=180)
    return json.loads(done.stdout)


STREAMS = """
import os, sys
from vtorque_core.cli.entry import open_streams
open_streams()
file = os.open(sys.executable, os.O_RDONLY)
sys.stdout.write("lost \\udcff"), sys.stderr.write("lost"), sys.stdout.flush()
code = os.system("exec 2>&1; : <&0 && echo lost")
sys.exit(0 if (file, code, sys.stdin.read()) == (3, 0, "") else 1)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&- 2>&-", "<&- >&-", "<&- >&- 2>&-", "</dev/null"])
def test_closed_standard_streams_are_opened_to_dev_null(closed):
    """Torque's hooks on sister nodes have no outputs: Python's sys.stdout would be None."""
    closed += " </dev/null" if "<" not in closed else ""
    words = ["/bin/sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-I", "-c", STREAMS]
    words.append("hook")
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_hook_with_output_on_a_full_disk_keeps_its_exit_status():
    """Torque's prologue writes into the job's output file: another status would requeue the job."""
    program = (
        "import sys; from vtorque_core.cli.entry import report_errors\n"
        "with report_errors('vtorque'):\n    print('x'); sys.stdout.flush(); sys.exit(5)\n"
    )
    argv = ["sh", "-c", '"$@" >/dev/full', "sh", sys.executable, "-I", "-c", program]
    codes = [subprocess.run([*argv, each], check=False).returncode for each in ("hook", "doctor")]
    assert codes == [5, 3]


LOCALE = """
import os
from vtorque_core.cli.entry import forget_coerced_locale
before = os.environ.get("LC_CTYPE", "")
forget_coerced_locale()
print(before, os.environ.get("LC_CTYPE", "none"))
"""


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "C.UTF-8 none"),
        ({"LC_CTYPE": "C.UTF-8"}, "C.UTF-8 C.UTF-8"),
        ({"LANG": "C.UTF-8", "LC_CTYPE": ""}, " "),
    ],
)
def test_locale_set_by_python_is_not_passed_to_jobs(environ, said):
    """The guest's shells would warn about a locale that the guest does not have."""
    argv = [sys.executable, "-I", "-c", LOCALE]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == said + "\n"


@pytest.mark.parametrize("command", ["reap", "setup", "doctor", "local", "plugins"])
def test_admin_command_drops_the_environment_of_its_caller(command):
    assert began(command) == [FIXED, 0o077]


def test_program_without_begin_keeps_the_environment():
    environ, umask = began("control")
    assert (environ, umask) == (HOSTILE, 0o002)


def test_program_that_is_not_isolated_is_executed_again_with_isolation():
    """With unchanged arguments; a hook's batch system is known by its environment only."""
    argv, environ, *_ = began("reap", "--json", "a b", isolated=False)
    assert argv[1:] == ["-I", "-m", "vtorque_core.cli.vtorque", "reap", "--json", "a b"]
    assert environ == FIXED
    argv, environ, *_ = began("hook", "prologue", "1.x", isolated=False)
    assert argv[1:] == ["-I", "-m", "vtorque_core.cli.vtorque", "hook", "prologue", "1.x"]
    assert environ == HOSTILE


def test_job_shell_keeps_the_environment_of_the_user():
    assert began("jobshell") == [HOSTILE, 0o002]


@pytest.mark.skipif(os.geteuid() != 0, reason="for other users nothing changes")
def test_installed_command_imports_nothing_from_pythonpath(tmp_path):
    """PYTHONPATH contains a module of the same name as a plugin's."""
    for name in ("vtorque_slurm", "rich"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "vtorque.toml").write_text('[plugins]\nenable = ["slurm"]\n')
    argv = [Path(sys.prefix, "bin", "vtorque"), "plugins", "--config", tmp_path / "vtorque.toml"]
    environ = {"PYTHONPATH": str(tmp_path)}
    subprocess.run(
        argv, env=environ, cwd=tmp_path, stdout=subprocess.DEVNULL, check=False, timeout=180
    )
    assert not (tmp_path / "ran").exists()
    argv[:1] = ["-c", "from vtorque_core.cli.admin import vtorque; vtorque()"]
    subprocess.run(
        [sys.executable, *argv], env=environ, cwd=tmp_path, capture_output=True, check=False,
        timeout=180,
    )  # fmt: skip
    assert (tmp_path / "ran").exists(), (
        "the attack fails without isolation, too: this test shows nothing"
    )


# -- Calls of root's programs ----------------------------------------------------------------------


def slurm_hook(_: Path) -> list[str]:
    from vtorque_slurm import hooks

    return shlex.split(hooks.prolog(PLACE).decode().splitlines()[3])


def torque_hook(top: Path) -> list[str]:
    from vtorque_pbs.torque import hooks

    lines = hooks.prologue(PLACE, top / "prologue", "first", top).decode().splitlines()
    first, again = (line for line in lines if " prologue first " in line)
    assert again.strip() == first
    return shlex.split(first)


def openpbs_hook(_: Path) -> list[str]:
    from vtorque_pbs.openpbs import hooks

    (line,) = (line for line in hooks.begin(PLACE).decode().splitlines() if "'prologue'" in line)
    return [str(word) for word in ast.literal_eval(line.partition(" + ")[0].strip())]


def iocm_manager(top: Path) -> list[str]:
    from vtorque_core.base.names import Paths
    from vtorque_iocm.node import ManagerProcess

    return list(ManagerProcess.for_node(Paths(top, top), 1.0, 0.5).argv)


def libexec_job_shell(_: Path) -> list[str]:
    last = setup_batch.jobshell_script(PLACE).decode().splitlines()[-1]
    return shlex.split(last)[1:]


def job_start(_: Path) -> list[str]:
    return become_job.command(3, 4)


@pytest.mark.parametrize(
    "called", [slurm_hook, torque_hook, openpbs_hook, iocm_manager, libexec_job_shell, job_start]
)
def test_every_entry_point_is_called_in_isolated_mode(called, tmp_path):
    argv = called(tmp_path)
    assert Path(argv[0]).is_absolute() and Path(argv[0]).name.startswith("python")
    assert argv[1] == "-I" and argv[2] == ("-S" if called is job_start else "-m")


def test_setup_calls_hooks_with_the_isolated_interpreter(tmp_path):
    """Otherwise a hook would run the command, whose Python depends on its environment."""
    assert PLACE.command == ("/opt/v/bin/python3", "-I", "-m", "vtorque_core.cli.vtorque")
    bent = Installation(PLACE.program, PLACE.config, PLACE.jobshell)
    assert "-I" not in bent.command


SOURCES = sorted(
    path
    for top in ("vtorque_core", "plugins")
    for path in (REPO / top).rglob("*.py")
    # trust.py: a list of places
    if not {"tests", "testing", "trust.py"} & set(path.relative_to(REPO).parts)
)


def test_every_started_python_is_isolated():
    """ "-I" must follow sys.executable in the arguments of any program."""
    started = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text if "sys.executable" in text else "")):
            for first, second in itertools.pairwise(getattr(node, "elts", ())):
                if ast.unparse(first) == "sys.executable":
                    started.append((path.name, ast.unparse(second)))
    assert len(started) >= 7
    assert [each for each in started if each[1] != "'-I'"] == []


# -- Code that others can write --------------------------------------------------------------------


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A copy of vtorque_core on disk, which the process takes for its own."""
    tmp_path.chmod(0o755)
    for name in (
        "prefix",
        "prefix/vtorque_core",
        "prefix/vtorque_core/base",
        "prefix/vtorque_core/cli",
        "prefix/bin",
    ):
        (tmp_path / name).mkdir(mode=0o755)
    for name in ("vtorque_core/base/trust.py", "vtorque_core/cli/hook.py", "bin/python3"):
        (tmp_path / "prefix" / name).touch(mode=0o644)
    prefix = tmp_path / "prefix"
    monkeypatch.setattr(trust, "__file__", str(prefix / "vtorque_core/base/trust.py"))
    monkeypatch.setattr(sys, "path", [str(prefix), str(prefix / "not-there.zip"), ""])
    monkeypatch.setattr(sys, "executable", str(prefix / "bin/python3"))
    trust.require_own_code(os.getuid())
    return prefix


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (".", 0o777), pytest.param("bin", 0o775, marks=pytest.mark.root), ("bin/python3", 0o666),
        ("vtorque_core", 0o757), ("vtorque_core/cli", 0o777), ("vtorque_core/cli/hook.py", 0o646),
    ],
)  # fmt: skip
def test_code_that_others_can_write_is_not_run(code, name, mode):
    (code / name).chmod(mode)
    with pytest.raises(ConfigError, match="can be written by others than root"):
        trust.require_own_code(os.getuid())


def test_import_directories_are_checked(code, tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "open"), *sys.path])
    with pytest.raises(ConfigError, match="open: can be written by others"):
        trust.require_own_code(os.getuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["vtorque_core/cli/hook.py", "bin/python3", "vtorque_core"])
def test_code_of_another_user_is_not_run(code, name):
    os.chown(code / name, 65534, -1)
    with pytest.raises(ConfigError, match="is owned by uid 65534"):
        trust.require_own_code()


def test_setup_makes_directories_that_users_can_enter(tmp_path):
    """New directories have mode 0755, although programs of root run with the umask 077."""
    old = os.umask(0o077)
    try:
        make_directories(tmp_path / "a/b")
    finally:
        os.umask(old)
    assert [p.stat().st_mode & 0o777 for p in (tmp_path / "a", tmp_path / "a/b")] == [0o755] * 2


# -- Entry points without click --------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--config", "/x/c.toml"], ["--config=/x/c.toml"]])
def test_hook_parses_a_leading_config_option_only(words, monkeypatch):
    from vtorque_core.cli import hook

    called = []
    monkeypatch.setattr(hook, "reset_process", lambda: None)
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(hook, "epilogue", lambda *given: called.append(given) or 0)
    assert hook.run(["hook", *words, "epilogue", "--", "1.x", "--config"]) == 0
    assert called == [(Path("/x/c.toml"), ["--", "1.x", "--config"])]


def test_unknown_hook_is_refused(monkeypatch):
    from vtorque_core.base.errors import UsageError
    from vtorque_core.cli import hook

    monkeypatch.setattr(hook, "reset_process", lambda: None)
    monkeypatch.setattr(gc, "disable", lambda: None)
    with pytest.raises(UsageError, match="write hook prologue or hook epilogue"):
        hook.run(["hook", "prolog"])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt, 130, "vtorque: interrupted\n"), (BrokenPipeError, 141, "")],
)
def test_interrupted_job_shell_prints_one_line(error, code, said, monkeypatch, capfd):
    from vtorque_core.cli import hook, vtorque

    def interrupted(_argv):
        raise error

    monkeypatch.setattr(hook, "run", interrupted)
    monkeypatch.setattr(vtorque, "secure_process", lambda _module: None)
    monkeypatch.setattr(vtorque.sys, "argv", ["vtorque", "jobshell"])
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # this process needs its output
    with pytest.raises(SystemExit) as ended:
        vtorque.main()
    assert ended.value.code == code
    assert capfd.readouterr().err == said


def test_become_clean_unblocks_all_signals():
    """OpenPBS's pbs_mom blocks signals, and daemons that a hook starts must end on SIGTERM."""
    program = (
        "import signal; from vtorque_core.cli.entry import reset_process; reset_process();"
        "print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    )

    def block():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})

    done = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=block, capture_output=True, check=True
    )
    assert done.stdout == b"[]\n"
