"""Resources requested by a command line, the environment and a script."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_slurm import options, resources
from vtorque_slurm.resources import SlurmRequest


def options_of(*argv, environ=(), lines=()):
    return SlurmRequest(options.split(argv), dict(environ), options.split(lines))


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
def test_cpus_of_a_node_are_computed(argv, cpus):
    assert resources.cpus_per_node(options_of(*argv)) == cpus


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
def test_memory_of_a_node_is_computed(argv, environ, lines, mib):
    assert resources.mib_per_node(options_of(*argv, environ=environ, lines=lines)) == mib


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300), ("5:30", 330), ("1:00:00", 3600), ("2-3", 183600), ("1-0:30", 88200),
        ("1-1:1:1", 90061), ("UNLIMITED", None), ("", None), ("-1", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_times_are_parsed(text, seconds):
    assert resources.seconds(text) == seconds


@given(st.integers(1, 10**8))
def test_shown_time_is_read_back(total):
    assert resources.seconds(resources.show_time(total)) == total
