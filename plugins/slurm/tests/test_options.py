"""sbatch's command line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api import UsageError
from vtorque_slurm import options
from vtorque_slurm.options import SBATCH, CommandLine


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
        (["-I", "-X"], "on Slurm, use --x11 with -I"),
        (["-J"], "a value is missing"),
        (["-vm"], "-vm: a value is missing"),
        (["--hold=1"], "takes no value"),
    ],
)
def test_invalid_option_is_refused(argv, message):
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
    assert (line.last_value("wrap"), line.plain, line.operands) == ("echo -I", ("-J", "x"), ("a",))


def test_interactive_option_is_separate_from_other_words():
    line = options.split(["-I", "-N2", "--x11=first", "--no-shell"])
    assert (line.interactive, line.words) == (True, ("-N2", "--x11=first", "--no-shell"))
    assert not options.split(["-J", "-I"]).interactive
    assert not options.split(["job.sh", "-I"]).interactive


def test_options_of_the_site_are_known():
    line = options.split(
        ["--container-image", "x", "--pyxis", "y"], ["--container-image=", "pyxis"]
    )
    assert line.options == (("container-image", "x"), ("pyxis", ""))
    assert line.operands == ("y",)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8))
def test_every_word_is_kept(words):
    """No word of an accepted command line is lost, except -vm and -I."""
    try:
        line = options.split(words)
    except UsageError:
        return
    vm = [part for value in line.vm for part in ("-vm", value)]
    ours = [*line.words, *line.operands, *vm, *(["-I"] if line.interactive else [])]
    assert sorted(set(ours)) == sorted(set(words))


def test_no_option_of_sbatch_is_missing():
    """The letters of sbatch(1), each with its long name; each letter is of one option."""
    letters = "AabBcCdDeFGhHiJkLmMnNoOpqQsStvVwWx"
    assert set(SBATCH.short) == set(letters)
    assert CommandLine().last_value("mem") is None
