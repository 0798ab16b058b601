"""sbatch's command line, #SBATCH lines, and what they ask for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api import UsageError
from vtorque_slurm import options, resources, script
from vtorque_slurm.options import SBATCH, CommandLine
from vtorque_slurm.resources import Given


def test_glued_short_long_and_abbreviated():
    argv = ["-N2", "-n", "4", "-Hv", "--mem=1G", "--time", "5", "-Jname", "--cpus-per-t=2"]
    line = options.split([*argv, "-vm", "ram=1G", "--exclusi", "job.sh", "-vm", "x", "--mem=9"])
    assert line.vm == ("ram=1G",)
    assert line.options == (
        ("nodes", "2"), ("ntasks", "4"), ("hold", ""), ("verbose", ""), ("mem", "1G"),
        ("time", "5"), ("job-name", "name"), ("cpus-per-task", "2"), ("exclusive", ""),
    )  # fmt: skip
    assert line.operands == ("job.sh", "-vm", "x", "--mem=9")
    assert line.words == (*argv, "--exclusi")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--no-such"], "--no-such is unknown"),
        (["--ti=1"], "ambiguous: --time, --time-min"),
        (["-HZ"], "-Z is unknown"),
        (["-J"], "a value is missing"),
        (["-vm"], "-vm: a value is missing"),
        (["--hold=1"], "takes no value"),
    ],
)
def test_what_is_no_option(argv, message):
    with pytest.raises(UsageError, match=message):
        options.split(argv)


def test_optional_values_are_glued_only():
    line = options.split(["--exclusive", "user", "-k", "-kno"])
    assert (line.options, line.operands) == ((("exclusive", ""),), ("user", "-k", "-kno"))
    assert options.split(["--exclusive=user", "-koff"]).options == (
        ("exclusive", "user"),
        ("no-kill", "off"),
    )


def test_wrap_is_known_by_any_name_and_left_out_of_plain():
    line = options.split(["--wra", "echo -I", "-J", "x", "--", "a"])
    assert (line.last("wrap"), line.plain, line.operands) == ("echo -I", ("-J", "x"), ("a",))


def test_interactive_is_a_word_of_its_own():
    line = options.split(["-I", "-N2", "--x11=first", "--no-shell"])
    assert (line.interactive, line.words) == (True, ("-N2", "--x11=first", "--no-shell"))
    assert not options.split(["-J", "-I"]).interactive
    assert not options.split(["job.sh", "-I"]).interactive


def test_a_sites_own_options():
    line = options.split(
        ["--container-image", "x", "--pyxis", "y"], ["--container-image=", "pyxis"]
    )
    assert line.options == (("container-image", "x"), ("pyxis", ""))
    assert line.operands == ("y",)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8))
def test_every_word_stays(words):
    """Whatever is accepted, no word is lost but -vm and -I."""
    try:
        line = options.split(words)
    except UsageError:
        return
    vm = [part for value in line.vm for part in ("-vm", value)]
    ours = [*line.words, *line.operands, *vm, *(["-I"] if line.interactive else [])]
    assert sorted(set(ours)) == sorted(set(words))


def test_lines_of_a_script():
    content = (
        b"#!/bin/bash\n# note\n\n#SBATCH --comment='a b' -N 2 # not --mem=1\n #SBATCH -n9\n"
        b'#SBATCH\t-J "x\\"y"\n##SBATCH -t1\n#SBATCHX -t2\n#SBATCH --what\necho\n#SBATCH -t3\n'
    )
    assert script.options(content).options == (
        ("comment", "a b"), ("nodes", "2"), ("job-name", 'x"y'),
    )  # fmt: skip


def test_lines_of_other_systems():
    content = b"#!/bin/sh\n#PBS -N x -l nodes=1,walltime=1:00\n#BSUB -M 5\n:\n#PBS -l mem=1gb\n"
    assert script.others_give(content) == {"job-name", "time", "mem"}
    assert script.others_give(b"#!/bin/sh\n#PBS -l nodes=1:ppn=2\n") == frozenset()


def asks(*argv, environ=(), lines=()):
    return Given(options.split(argv), dict(environ), options.split(lines))


@pytest.mark.parametrize(
    ("argv", "cpus"),
    [
        ([], None),
        (["-c4"], 4),
        (["-n1"], 1),
        (["-n4"], None),
        (["-n4", "-N2"], 2),
        (["-n5", "-N1-2", "-c2"], 4),
        (["-n4", "-N0"], None),
        (["--ntasks-per-node=3", "-c2"], 6),
        (["--tasks-per-node=3"], 3),
        (["--mincpus=4"], 4),
        (["-c2", "--mincpus=4"], 4),
        (["-n4", "--mincpus=8"], 8),
        (["-cx"], 1),
        (["--exclusive"], None),
    ],
)
def test_cpus_of_a_node(argv, cpus):
    assert resources.cpus_per_node(asks(*argv)) == cpus


@pytest.mark.parametrize(
    ("argv", "environ", "lines", "mib"),
    [
        ([], {}, [], None),
        (["--mem=1G"], {}, ["--mem=2G"], 1024),
        (["--mem=0"], {}, [], None),
        ([], {"SBATCH_MEM_PER_NODE": "3000"}, ["--mem=2G"], 3000),
        ([], {}, ["--mem=2t"], 2 * 1024 * 1024),
        (["--mem=1"], {}, ["--mem-per-cpu=2G"], 1),
        (["--mem-per-cpu=100", "-c3"], {}, [], 300),
        (["--mem-per-cpu=100"], {}, [], None),
        (["--mem=1025K"], {}, [], 2),
        (["--mem=lots"], {}, [], None),
    ],
)
def test_memory_of_a_node(argv, environ, lines, mib):
    assert resources.mib_per_node(asks(*argv, environ=environ, lines=lines)) == mib


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300), ("5:30", 330), ("1:00:00", 3600), ("2-3", 183600), ("1-0:30", 88200),
        ("1-1:1:1", 90061), ("UNLIMITED", None), ("", None), ("-1", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_times(text, seconds):
    assert resources.seconds(text) == seconds


@given(st.integers(1, 10**8))
def test_a_time_is_shown_as_it_is_read(total):
    assert resources.seconds(resources.show_time(total)) == total


def test_no_option_of_sbatch_is_missing():
    """The letters of sbatch(1), each with its long name; a letter is of one option."""
    letters = "AabBcCdDeFGhHiJkLmMnNoOpqQsStvVwWx"
    assert set(SBATCH.short) == set(letters)
    assert CommandLine().last("mem") is None
