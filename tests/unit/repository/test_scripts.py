"""Shared functions and messages of the scripts, without root."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def bash(text, *argv):
    """Run bash with the scripts' shared functions."""
    words = ["bash", "-euo", "pipefail", "-c", f'. "{SCRIPTS}/common"; {text}', "scripts/x", *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)


def test_recorded_process_is_found_only_while_its_pid_is_not_reused(tmp_path):
    """The pid may belong to another process by now, which must not be killed."""
    file = tmp_path / "x.pid"
    assert bash('record "$1" "$2"', str(file), str(os.getpid())).returncode == 0
    pid, began = file.read_text().split()
    assert bash('recorded "$1"', str(file)).stdout == f"{pid}\n" == f"{os.getpid()}\n"
    for said in (f"{pid} {int(began) - 1}", f"{pid}", "", f"999999999 {began}"):
        file.write_text(f"{said}\n")
        assert bash('recorded "$1" || echo none', str(file)).stdout == "none\n", said
    assert bash('recorded "$1/nothing" || echo none', str(tmp_path)).stdout == "none\n"


def test_zombie_process_counts_as_ended(tmp_path):
    child = subprocess.Popen(["sleep", "0"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert bash('began "$1" || echo none', str(child.pid)).stdout == "none\n"
    child.wait()


def test_failure_prints_the_end_of_its_log(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n" for number in range(50)))
    done = bash('stage "the daemon"; fail "it did not start" "$1"', str(log))
    assert done.returncode == 1 and "line 29\n" not in done.stderr
    assert done.stderr.startswith(f"scripts/x: it did not start\nThe end of {log}:\nline 30\n")
    assert done.stderr.endswith("line 49\nscripts/x: failed: the daemon\n")
    done = bash('fail "it did not start" "$1"', str(log.with_name("none")))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "(it has none)")
    done = bash('stage "the daemon"; false; done_')
    assert (done.returncode, done.stderr) == (1, "scripts/x: failed: the daemon\n")
    done = bash('stage "the daemon"; quiet sh -c "echo why; exit 3"')
    assert (done.returncode, done.stderr) == (3, "why\nscripts/x: failed: the daemon\n")
    done = bash('stage "the daemon"; quiet echo well; done_; exit 4')
    assert (done.returncode, done.stderr) == (4, "")


def test_show_python_prints_version_and_real_path(tmp_path):
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", tmp_path], check=True)
    real = Path("/usr/bin/python3").resolve()
    version = subprocess.run([real, "-V"], capture_output=True, text=True, check=True).stdout
    for python in ("/usr/bin/python3", tmp_path / "bin/python"):
        said = bash('show_python "$1"', str(python)).stdout
        assert said == f"scripts/x: {version.strip()}, {real}\n"


def test_venv_commands_name_the_python_by_its_path():
    """The first Python in PATH may be unreadable for users, or differ from that of the wheels."""
    top = SCRIPTS.parent
    files = [path for path in SCRIPTS.iterdir() if path.is_file()]
    files += [top / "README.md", top / "CONTRIBUTING.md", *top.glob("doc/**/*.md")]
    files += top.glob("plugins/*/README.md")
    by_path = re.compile(r"(?<![\w/])python3?[\d.]* -m venv")
    assert [path.name for path in files if by_path.search(path.read_text())] == []


@pytest.mark.parametrize("name", ["common", "cluster", "demo", "machine", "node", "test"])
def test_bash_understands_the_script(name):
    done = subprocess.run(["bash", "-n", SCRIPTS / name], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_wheels_script_prints_help_and_rejects_unknown_options(tmp_path):
    argv = [str(SCRIPTS / "wheels"), "--help"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Build wheels") and "[DIR [DISTRIBUTION...]]" in done.stdout
    assert not list(tmp_path.iterdir())
    argv[-1] = "--hlep"
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "there is no option --hlep" in done.stderr


PYTHON_DOUBLE = """#!/bin/sh
# Stands for a Python whose virtual environments have a pip that writes its arguments.
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
cat > "$3/bin/pip" <<'END'
#!/bin/sh
printf '%s\n' "$@" > "{top}/arguments"
mkdir -p "$4"; touch "$4/x.whl"
END
chmod +x "$3/bin/pip"
"""


def test_named_distributions_are_added_to_the_default_wheels(tmp_path):
    python = tmp_path / "python3"
    python.write_text(PYTHON_DOUBLE.replace("{top}", str(tmp_path)))
    python.chmod(0o755)

    def built(*names):
        done = subprocess.run(
            [str(SCRIPTS / "wheels"), "out", *names], cwd=tmp_path, check=False, timeout=180,
            env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        words = (tmp_path / "arguments").read_text().splitlines()
        return words[words.index("-w") + 2 :]

    top = SCRIPTS.parent
    names = ("admin", "images", "jobs", "joblog", "linux-guest", "local", "pbs", "report")
    default = [str(top), *(f"{top}/plugins/{name}" for name in names)]
    assert built() == default
    more = [f"{top}/plugins/experiment", f"{top}/plugins/report[html]", f"{top}/testing"]
    assert built("experiment", "jobs", "report[html]", "testing") == [*default, *more]


def test_wheels_of_an_unknown_distribution_are_an_error(tmp_path):
    for name in ("acme", "", "../x"):
        done = subprocess.run(
            [str(SCRIPTS / "wheels"), "out", name], cwd=tmp_path, check=False, timeout=180,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 1 and f"there is no distribution {name}" in done.stderr
    assert not list(tmp_path.iterdir())


WITHOUT_SPHINX = "import runpy, sys; sys.modules['sphinx'] = None; runpy.run_path(sys.argv[1])"


def test_docs_without_sphinx_fail_with_one_line():
    argv = [sys.executable, "-c", WITHOUT_SPHINX, str(SCRIPTS / "docs")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"scripts/docs: .* has no sphinx\. .*\n", done.stderr)


NAMED = "printf vtq-daemon > /proc/self/comm; echo; read -r _"


def test_own_lists_only_processes_of_root():
    """An ordinary user may run a virtlogd and a libvirtd, too."""
    is_root = os.geteuid() == 0
    users = [65534, 0] if is_root else [os.geteuid()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [subprocess.Popen(["bash", "-c", NAMED], user=user, **pipes) for user in users]
    try:
        for process in started:
            process.stdout.readline()
        listed = bash('own "$1" || true', "vtq-daemon").stdout.split()
    finally:
        for process in started:
            process.communicate(b"\n")
    assert listed == ([str(started[1].pid)] if is_root else [])


def test_parts_of_the_long_run_name_existing_test_files():
    table = re.search(r'^parts="\n(.*?)^"', (SCRIPTS / "test").read_text(), re.M | re.S)[1]
    found = {
        path.stem
        for top in ("tests", "plugins")
        for path in SCRIPTS.parent.glob(f"{top}/**/test_*.py")
    }
    named = [name for line in table.splitlines() for name in line.split()[2:] if name != "rest"]
    assert named and [name for name in named if f"test_{name}" not in found] == []
