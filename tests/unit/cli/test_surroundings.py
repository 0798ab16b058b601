"""Commands with closed or full standard streams, or no directory or config: no traceback."""

import ctypes
import json
import os
import re
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest

import sparing
from vtorque_admin import doctor
from vtorque_core.cli import admin, vsub, vtorque
from vtorque_core.cli.run_click import run
from vtorque_core.cli.vmgr import vmgr
from vtorque_core.config.plugins import Plugins
from vtorque_core.live import command_groups
from vtorque_testing.harness import ProgramResult
from vtorque_testing.submit import run_in_child

FULL, GONE = "No space left on device", 128 + signal.SIGPIPE


@pytest.fixture
def site(tmp_path: Path) -> Path:
    config = tmp_path / "vtorque.toml"
    paths = f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n'
    config.write_text(f'{paths}[images]\npool = "{tmp_path}/images"\n')
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    return config


def call(
    words: list[str], site: Path, prepare: Callable[[], object] = lambda: None
) -> ProgramResult:
    """Run a command in a fork, after ``prepare`` there."""
    program, *argv = words

    def work() -> int:
        prepare()
        sys.argv = [program, *argv]
        mains = {
            "vmgr": lambda: run(vmgr, "vmgr"), "vsub": vsub.main, "vtorque program": vtorque.main,
        }  # fmt: skip
        try:
            mains.get(program, lambda: run(admin.vtorque, "vtorque"))()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    environ = {"PATH": "/usr/bin:/bin", "HOME": str(site.parent)}
    return run_in_child(work, b"", environ, site.parent)


def full(number: int) -> Callable[[], object]:
    return lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def closed(*numbers: int) -> Callable[[], None]:
    """Simulate descriptors that the caller has closed: no object, no descriptor."""

    def close() -> None:
        for number in numbers:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)

    return close


def without_reader() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def without_capabilities() -> None:
    """Make root subject to the permissions of files (capset(2), capability.h of Linux)."""
    version = struct.pack("=Ii", 0x20080522, 0)
    assert ctypes.CDLL(None).capset(version, bytes(24)) == 0


def in_removed_directory() -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").rmdir()


@dataclass(frozen=True)
class Found:
    """A command: its words, and for each word the click command of that name."""

    words: tuple[str, ...]
    chain: tuple[click.Command, ...]

    def with_config(self, config: Path) -> list[str] | None:
        """Return arguments that name this site config; None: the command has none."""
        words = list(self.words)
        for at in reversed(range(len(words))):
            for param in self.chain[at].params if at or words[0] == "vmgr" else ():
                option = {"--config", "--file"}.intersection(param.opts)
                if option:
                    return [*words[: at + 1], *option, str(config), *words[at + 1 :]]
        return None

    def needed(self, site: Path) -> list[str]:
        """Return a word for each required argument and option of the command."""
        words = []
        for param in self.chain[-1].params:
            if not param.required:
                continue
            value = "1"
            if isinstance(param.type, click.Path):
                value = str(site if param.type.file_okay else site.parent)
            is_option = isinstance(param, click.Option)
            words += [max(param.opts, key=len), value] if is_option else [value]
        return words


def every(found: Found, config: Path) -> Iterator[Found]:
    """Yield a command and all its subcommands, including those of plugins."""
    yield found
    group = found.chain[-1]
    if isinstance(group, click.Group):
        context = click.Context(group, info_name=found.words[-1])
        context.params["config"] = config
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from every(Found((*found.words, name), (*found.chain, command)), config)


def commands(config: Path) -> list[Found]:
    found = [
        *every(Found(("vmgr",), (vmgr,)), config),
        *every(Found(("vtorque",), (admin.vtorque,)), config),
    ]
    assert len(found) > 60
    return found


def call_all(
    argvs: Sequence[Sequence[str]], site: Path, fault: Callable[[], object]
) -> list[ProgramResult]:
    """Run commands one after the other in one fork, each with the fault.

    A process for each command and fault would take minutes. No command may start another program.
    """
    results = site.parent / "results"

    def one(argv: Sequence[str], streams: Sequence[int]) -> tuple[int, str]:
        os.chdir(site.parent)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, closefd=False)  # noqa: SIM115 - the command may close it
            for number, mode in enumerate("rww")
        )
        before = os.lseek(streams[2], 0, os.SEEK_END)
        fault()
        sys.argv = list(argv)
        mains = {"vmgr": lambda: run(vmgr, "vmgr"), "vsub": vsub.main}
        try:
            mains.get(argv[0], lambda: run(admin.vtorque, "vtorque"))()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 70
        except BaseException:  # the traceback that Python would print
            os.write(streams[2], traceback.format_exc().encode())
            code = 70
        return code, os.pread(streams[2], 1 << 20, before).decode()

    def all_of_them() -> int:
        def no_program(*_: object, **__: object) -> NoReturn:
            raise AssertionError("it starts a program")

        subprocess.Popen.__init__ = no_program  # type: ignore[method-assign]
        os.execv = os.execve = os.execvp = os.posix_spawn = no_program
        doctor.require_tree = lambda *_: None  # it would examine each file of .venv
        load_plugins, kept = Plugins.load, dict[str, Plugins]()

        def once(**how: Any) -> Plugins:
            key = repr(how)
            if key not in kept:
                kept[key] = load_plugins(**how)
            return kept[key]

        Plugins.load = once  # type: ignore[method-assign]
        command_groups.CONFIG_PATH = site
        streams = [os.dup(number) for number in range(3)]
        ends = [one(argv, streams) for argv in argvs]
        results.write_text(json.dumps(ends))
        return 0

    done = run_in_child(
        all_of_them, b"", {"PATH": "/usr/bin:/bin", "HOME": str(site.parent)}, site.parent
    )
    assert done.code == 0, done
    return [
        ProgramResult(code, b"", said.encode()) for code, said in json.loads(results.read_text())
    ]


FAULTS = {
    "full standard output": (full(1), 3, f"{{}}: standard output: {FULL}\n"),
    "closed standard output": (closed(1), 3, "{}: standard output: Bad file descriptor\n"),
    "standard output without a reader": (without_reader, GONE, ""),
    "closed input": (closed(0), 0, ""),
    "full standard error": (full(2), 0, ""),
    "closed standard error": (closed(2), 0, ""),
    "all closed": (closed(0, 1, 2), 3, ""),
    "removed working directory": (in_removed_directory, 0, ""),
}
SILENT = ("full standard error", "closed standard error", "all closed")


def of_site(found: Found, config: Path) -> list[str]:
    return found.with_config(config) or list(found.words)


@pytest.mark.parametrize("name", sparing.each(3, FAULTS))
def test_help_of_every_command_with_each_fault_prints_at_most_one_line(site, name):
    fault, code, said = FAULTS[name]
    argvs = [[*of_site(each, site), "--help"] for each in commands(site)]
    argvs.append(["vsub", "--config", str(site), "--help"])
    ends = call_all(argvs, site, fault)
    wrong = [
        (argv, ended) for argv, ended in zip(argvs, ends, strict=True)
        if (ended.code, ended.stderr.decode()) != (code, said.format(argv[0]))
    ]  # fmt: skip
    assert wrong == [], "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", sparing.each(3, FAULTS))
def test_wrong_usage_of_every_command_with_each_fault_exits_with_2(site, name):
    argvs = [[*of_site(each, site), "--no-such-option"] for each in commands(site)]
    script = str(site.parent / "job.sh")
    argvs.append(["vsub", "--config", str(site), "-vm", "none", "--no-such-option", script])
    ends = call_all(argvs, site, FAULTS[name][0])
    wrong = [
        (argv, ended) for argv, ended in zip(argvs, ends, strict=True)
        if ended.code != 2
        or b"Traceback" in ended.stderr
        or not (name in SILENT or re.search(b"--no-such-option|been removed", ended.stderr))
    ]  # fmt: skip
    assert wrong == [], "\n".join(map(str, wrong))


# These commands write the config, or do not need one.
WITHOUT = {("vtorque", *words.split()) for words in ("config example", "setup install")}
WITHOUT |= {("vtorque", "setup", "uninstall")}


def with_each_config(site: Path, config: Path) -> list[list[str]]:
    """Return every command that reads a site config, with this one and its other arguments."""
    argvs = []
    for each in commands(site):
        if isinstance(each.chain[-1], click.Group) and each.words != ("vmgr", "checkpoints"):
            continue
        if each.words not in WITHOUT:
            words = each.with_config(config)
            assert words is not None, each.words
            argvs.append([*words, *each.needed(site)])
    return [*argvs, ["vsub", "--config", str(config), "-vm", "none", "job.sh"]]


def unexpected_ends(
    argvs: Sequence[Sequence[str]], ends: Sequence[ProgramResult], line: str, silent: bool
) -> list[tuple[Sequence[str], ProgramResult]]:
    """Return the commands that ended with anything but this line about the config."""
    wrong = []
    for argv, ended in zip(argvs, ends, strict=True):
        check = list(argv[:3]) == ["vtorque", "config", "check"]
        said = "" if silent else line if check else f"{argv[0]}: {line}"
        if (ended.code, ended.stderr.decode()) != (1 if check else 2, said):
            wrong.append((argv, ended))
    return wrong


@pytest.mark.parametrize("name", sparing.each(3, FAULTS))
def test_missing_config_of_every_command_with_each_fault_prints_one_line(site, name):
    """The commands really run, but have no effect."""
    missing = site.parent / "missing.toml"
    argvs = with_each_config(site, missing)
    ends = call_all(argvs, site, FAULTS[name][0])
    line = f"{missing}: No such file or directory\n"
    assert unexpected_ends(argvs, ends, line, name in SILENT) == []


def unreadable(config: Path) -> str:
    config.write_text("")
    config.chmod(0)
    return f"{config}: Permission denied\n"


def a_directory(config: Path) -> str:
    config.mkdir()
    return f"{config}: Is a directory\n"


def not_utf8(config: Path) -> str:
    config.write_bytes(b'[node]\nlibvirt_uri = "\xe4"\n')
    return f"{config}:2: is not UTF-8\n"


def not_toml(config: Path) -> str:
    config.write_text("[node\n")
    problem = "Expected ']' at the end of a table declaration (at line 1, column 6)"
    return f"{config}:1: is not TOML: {problem}\n"


@pytest.mark.parametrize("make", [unreadable, a_directory, not_utf8, not_toml])
def test_unreadable_config_of_every_command_prints_one_line(site, make):
    config = site.parent / "broken.toml"
    line = make(config)
    argvs = with_each_config(site, config)
    ends = call_all(argvs, site, without_capabilities)
    assert unexpected_ends(argvs, ends, line, silent=False) == []


@pytest.mark.parametrize("fault", [full(2), closed(2)])
def test_error_that_cannot_be_written_keeps_its_exit_status(site, fault):
    given = ["vsub", "--config", str(site), "-vm", "ramm=1G", "job.sh"]
    assert call(given, site, fault).code == 2
    assert call(["vmgr", "nope"], site, fault).code == 2


def test_buffered_output_on_a_full_disk_is_reported(site):
    for words in (
        ["vtorque", "config", "show", "--file"],
        ["vtorque", "plugins", "--config"],
        ["vtorque", "plugins", "--json", "--config"],
    ):
        ended = call([*words, str(site)], site, full(1))
        assert (ended.code, ended.stderr.decode()) == (3, f"vtorque: standard output: {FULL}\n")


@pytest.mark.parametrize("words", [["-vm", "none"], ["-vm", "ram=1G"], []])
def test_vsub_in_a_removed_directory_prints_one_line(site, words):
    """A job starts in the directory of its submission; other commands need no directory."""
    given = ["vsub", "--config", str(site), *words, str(site.parent / "job.sh")]
    ended = call(given, site, in_removed_directory)
    assert (ended.code, ended.stderr) == (
        2, b"vsub: the current directory has been removed: change to another one\n",
    )  # fmt: skip


def test_table_is_printed_in_a_removed_directory(site):
    for words in (["config", "show", "--file"], ["plugins", "--config"]):
        ended = call(["vtorque", *words, str(site)], site, in_removed_directory)
        assert (ended.code, ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words",
    [
        ["vsub", "--config", "{}", "-vm", "none", "job.sh"],
        ["vmgr", "--config", "{}", "ps"],
        ["vmgr", "--config", "{}", "logs", "1"],
        ["vtorque", "config", "check", "--file", "{}"],
        ["vtorque", "config", "show", "--file={}"],
        ["vtorque", "config", "explain", "--file", "{}", "--as", "root"],
        ["vtorque", "plugins", "--config", "{}"],
        ["vtorque", "local", "serve", "--config", "{}"],
        ["vtorque", "local", "stop", "--config={}"],
        ["vtorque", "doctor", "--config", "{}"],
        ["vtorque", "reap", "--config", "{}"],
    ],
)
def test_named_config_must_exist(site, words):
    """With the defaults instead, a job would use another node or another policy."""
    missing = site.parent / "missing.toml"
    ended = call([word.format(missing) for word in words], site)
    assert ended.code == (1 if "check" in words else 2)
    said = "" if "check" in words else f"{words[0]}: "
    assert ended.stderr.decode() == f"{said}{missing}: No such file or directory\n"


def test_config_explain_reads_only_the_named_config(site):
    """A new config can be explained before it replaces a broken one."""
    broken = site.parent / "broken.toml"
    broken.write_text("[node")
    ended = call(
        ["vtorque", "config", "explain", "--file", str(site), "--as", "root"],
        site,
        lambda: setattr(command_groups, "CONFIG_PATH", broken),
    )
    assert (ended.code, ended.stderr) == (0, b"")


def odd_words(site: Path, odd: str) -> list[list[str]]:
    """Return calls of every command with ``odd`` as the value of each argument and option."""
    argvs = []
    for each in commands(site):
        command = each.chain[-1]
        if isinstance(command, click.Group) or each.words in WITHOUT:
            continue
        words = each.with_config(site)
        assert words is not None
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        if arguments:
            argvs.append([*words, *([odd] * len(arguments))])
        for param in command.params:
            named = isinstance(param, click.Option) and not param.is_flag and not param.count
            if named and param.name not in ("config", "file"):
                argvs.append([*words, *each.needed(site), f"{max(param.opts, key=len)}={odd}"])
    return argvs


@pytest.mark.parametrize("odd", ["", "x\udcff", "\x1b[2J", "no-such"])
def test_odd_argument_or_option_of_every_command_is_shown_as_it_is(site, odd):
    """The output has no traceback, control character, empty name or surrogate escape."""
    argvs = odd_words(site, odd)
    ends = call_all(argvs, site, lambda: None)
    wrong = [
        (argv, ended) for argv, ended in zip(argvs, ends, strict=True)
        if not (ended.code in (0, 1, 2, 122) or b"it starts a program" in ended.stderr)
        or re.search(rb"\\udc|\x1b|job  |job :|^\w+: :", ended.stderr)
    ]  # fmt: skip
    assert wrong == [], "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["vmgr", "cancel", ""], "vmgr cancel: the argument JOB"),
        (["vmgr", "cancel", "1", ""], "vmgr cancel: the argument JOB"),
        (["vmgr", "logs", ""], "vmgr logs: the argument JOB"),
        (["vmgr", "report", ""], "vmgr report: the argument JOB"),
        (["vmgr", "checkpoints", "remove", ""], "vmgr checkpoints remove: the argument ID"),
        (["vmgr", "images", "show", ""], "vmgr images show: the argument NAME"),
        (["vtorque", "reap", ""], "vtorque reap: the argument JOB"),
    ],
)
def test_empty_argument_is_refused(site, words, name):
    """An empty argument, such as an unset variable in a script, must not mean all jobs."""
    at = words[:1] if words[0] == "vmgr" else words[:2]
    ended = call([*at, "--config", str(site), *words[len(at) :]], site)
    assert (ended.code, ended.stderr.decode()) == (2, f"{words[0]}: {name} is empty\n")


def test_commands_of_every_plugin_are_tried(site):
    """Commands of all distributions of this checkout, vtorque-admin and vtorque-own-images too."""
    found = {" ".join(each.words) for each in commands(site)}
    sources = Path(__file__).parents[3].glob("plugins/*/vtorque_*/*.py")
    declared = {
        words
        for path in sources
        for words in re.findall(r'\bCommand\(\s*"([a-z -]+)"', path.read_text())
    }
    assert {"vmgr images pull", "vtorque doctor", "vmgr ps"} <= declared <= found


PROGRAMS = [
    pytest.param("hook --config {} prologue", marks=pytest.mark.root),
    "jobshell --config {}",
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("streams", ["2>/dev/full", "<&- >&- 2>&-"])
def test_program_of_the_batch_system_started_by_hand_prints_nothing_else(site, program, streams):
    argv = (sys.executable, "-I", "-m", "vtorque_core.cli.vtorque")
    line = f"{' '.join(argv)} {program.format(site)} {streams}"
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=site.parent, env={}, capture_output=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode in (2, 122)
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fault", [lambda: None, full(1), closed(1)])
def test_program_of_the_batch_system_called_by_hand_prints_one_line(
    monkeypatch, site, program, fault
):
    """The fork starts no isolated Python, as the programs above do."""
    monkeypatch.setattr(vtorque, "secure_process", lambda _: None)
    done = call(["vtorque program", *program.format(site).split()], site, fault)
    assert done.code in (2, 122)
    assert done.stdout == b""
    assert len(done.stderr.splitlines()) == 1, done.stderr
