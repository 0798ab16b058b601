"""Commands with closed or full standard streams, or no directory or config: no traceback."""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from vtorque_core.cli import admin, vsub
from vtorque_core.cli.lazy import LazyGroup, run
from vtorque_core.cli.vmgr import vmgr
from vtorque_testing.harness import Ended
from vtorque_testing.submit import in_child

FULL, GONE = "No space left on device", 128 + signal.SIGPIPE


@pytest.fixture
def site(tmp_path: Path) -> Path:
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n')
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    return config


def call(words: list[str], site: Path, prepare: Callable[[], object] = lambda: None) -> Ended:
    """Run a command in a fork, after ``prepare`` there."""
    program, *argv = words

    def work() -> int:
        prepare()
        sys.argv = [program, *argv]
        mains = {"vmgr": lambda: run(vmgr, "vmgr"), "vsub": vsub.main}
        try:
            mains.get(program, lambda: run(admin.vtorque, "vtorque"))()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    environ = {"PATH": "/usr/bin:/bin", "HOME": str(site.parent)}
    return in_child(work, b"", environ, site.parent)


def full(number: int) -> Callable[[], object]:
    return lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def closed(*numbers: int) -> Callable[[], None]:
    """As Python has it if its caller has closed them: no object, no descriptor."""

    def close() -> None:
        for number in numbers:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)

    return close


def without_reader() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def in_removed_directory() -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").rmdir()


def every(group: click.Command, words: list[str], config: Path) -> Iterator[list[str]]:
    """Yield the words of a command and of all below it, those that plugins bring too."""
    yield words
    if isinstance(group, LazyGroup | click.Group):
        context = click.Context(group, info_name=words[-1])
        context.params["config"] = config
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from every(command, [*words, name], config)


def commands(config: Path) -> list[list[str]]:
    found = [*every(vmgr, ["vmgr"], config), *every(admin.vtorque, ["vtorque"], config)]
    assert len(found) > 50
    return [*found, ["vsub"]]


FAULTS = {
    "full": (full(1), 3, f"{{}}: standard output: {FULL}\n"),
    "closed": (closed(1), 3, "{}: standard output: Bad file descriptor\n"),
    "no reader": (without_reader, GONE, ""),
    "no input": (closed(0), 0, ""),
    "full errors": (full(2), 0, ""),
    "no errors": (closed(2), 0, ""),
    "none": (closed(0, 1, 2), 3, ""),
    "no directory": (in_removed_directory, 0, ""),
}


def test_help_of_every_command_ends_in_one_line_at_most(site):
    """Each command with one of the faults in turn, three commands with all of them."""
    wrong = []
    cases = [*zip(commands(site), itertools.cycle(FAULTS))]
    cases += itertools.product((["vmgr"], ["vtorque", "doctor"], ["vsub"]), FAULTS)
    for words, name in cases:
        fault, code, said = FAULTS[name]
        ended = call([*words, "--help"], site, fault)
        if (ended.code, ended.stderr.decode()) != (code, said.format(words[0])):
            wrong.append((words, name, ended))
    assert wrong == []


@pytest.mark.parametrize("fault", [full(2), closed(2)])
def test_an_error_that_cannot_be_written_keeps_its_exit_status(site, fault):
    given = ["vsub", "--config", str(site), "-vm", "ramm=1G", "job.sh"]
    assert call(given, site, fault).code == 2
    assert call(["vmgr", "nope"], site, fault).code == 2


def test_output_of_tables_and_json_that_is_buffered_is_not_lost_in_silence(site):
    for words in (
        ["vtorque", "config", "show", "--file"],
        ["vtorque", "plugins", "--config"],
        ["vtorque", "plugins", "--json", "--config"],
    ):
        ended = call([*words, str(site)], site, full(1))
        assert (ended.code, ended.stderr.decode()) == (3, f"vtorque: standard output: {FULL}\n")


@pytest.mark.parametrize("words", [["-vm", "none"], ["-vm", "ram=1G"], []])
def test_vsub_in_a_removed_directory_says_so_in_a_line(site, words):
    """A job begins in the directory of its submission; other commands need none."""
    given = ["vsub", "--config", str(site), *words, str(site.parent / "job.sh")]
    ended = call(given, site, in_removed_directory)
    assert (ended.code, ended.stderr) == (
        2, b"vsub: the current directory has been removed: change to another one\n",
    )  # fmt: skip


def test_a_table_is_printed_in_a_removed_directory(site):
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
def test_a_config_that_is_named_must_exist(site, words):
    """With the defaults in its place a job would go to another node, or by another policy."""
    missing = site.parent / "missing.toml"
    ended = call([word.format(missing) for word in words], site)
    assert ended.code == (1 if "check" in words else 2)
    said = "" if "check" in words else f"{words[0]}: "
    assert ended.stderr.decode() == f"{said}{missing}: No such file or directory\n"
