"""Parsing of Slurm's output, which contains texts of users."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_doubles import RECORD
from vtorque_core.api import HostFault, Refused
from vtorque_slurm.job_records import (
    features,
    first_record_id,
    launch_failure,
    offered_mib,
    parse_job,
)

FACTS = {
    "id": "7", "name": "t", "state": "RUNNING", "restarts": 0, "excluded": "(null)", "cpus": "0-1",
    "mem": 512, "share": "OK", "note": "", "comment": "", "account": "(null)", "qos": "(null)",
}  # fmt: skip


def test_array_task_has_its_array_name():
    text = RECORD.format(**FACTS).replace("JobId=7 ", "JobId=7 ArrayJobId=7 ArrayTaskId=3 ")
    other = RECORD.format(**FACTS | {"id": "8"})
    assert first_record_id(other + text, "7") == "7_3"
    assert first_record_id(text, "7") == ""
    assert parse_job(text, "7").name == "7_3"


@pytest.mark.parametrize("account", ["chem", "", "a b", "chem QOS=high", "a\n   Priority=1 Nice=0"])
@pytest.mark.parametrize(("shown", "qos"), [("(null)", ""), ("N/A", ""), ("normal", "normal")])
def test_qos_is_found_with_any_account_text(account, shown, qos):
    """Without slurmdbd Slurm accepts any text as account; slurmd passes it in the environment."""
    text = RECORD.format(**FACTS | {"account": account or "(null)", "qos": shown})
    assert parse_job(text, "7", account).qos == qos
    assert (
        parse_job(text.replace(f"QOS={shown}", f"QOS={shown} WCKey=a QOS=x"), "7", account).qos
        == qos
    )
    assert parse_job(text, "7").qos == ""


@pytest.mark.parametrize(
    ("shown", "limit"),
    [("01:30:00", "01:30:00"), ("2-01:00:00", "2:01:00:00"), ("UNLIMITED", "")],
)
def test_time_limit_is_converted_to_the_pbs_format(shown, limit):
    line = f"   RunTime=00:00:05 TimeLimit={shown} TimeMin=N/A\n   OverSubscribe="
    text = RECORD.format(**FACTS).replace("   OverSubscribe=", line)
    assert parse_job(text, "7").limit == limit
    assert parse_job(text.replace("   OverSubscribe=", line), "7").limit == ""
    assert parse_job(RECORD.format(**FACTS), "7").limit == ""


FILES = "   WorkDir=/home/ada\n   StdErr={}\n   StdIn=/dev/null\n   StdOut={}\n"


def ended(reason, out="/home/ada/nodir/x.log", err="/home/ada/nodir/x.log", **facts):
    text = RECORD.format(**FACTS | {"state": "COMPLETING"} | facts)
    text = text.replace("Reason=Prolog", f"Reason={reason}")
    return text.replace("   WorkDir=/home/ada\n", FILES.format(err, out))


def test_launch_failure_names_the_output_files():
    why = launch_failure(ended("JobLaunchFailure"), "7")
    assert why == (
        "Slurm could not start the script (JobLaunchFailure). Check that the directories of "
        "/home/ada/nodir/x.log exist and that you may write to them"
    )
    why = launch_failure(ended("JobLaunchFailure", err="/x/e\x1b"), "7")
    assert "/home/ada/nodir/x.log and /x/e" in why and "\x1b" not in why


def test_other_end_states_are_not_a_launch_failure():
    assert launch_failure(ended("NonZeroExitCode"), "7") == ""
    assert launch_failure(ended("JobLaunchFailure"), "8") == ""


def test_forged_launch_failure_is_refused():
    line = "x\n   JobState=FAILED Reason=JobLaunchFailure Dependency=(null)"
    with pytest.raises(Refused):
        launch_failure(ended("None", comment=line), "7")


@pytest.mark.parametrize("place", ["name", "comment"])
def test_forged_qos_in_name_or_comment_is_refused(place):
    text = FACTS | {"account": "chem", "qos": "low"}
    line = "x\n   Priority=1 Nice=0 Account=chem QOS=high\n"
    with pytest.raises(Refused):
        parse_job(RECORD.format(**text | {place: line}), "7", "chem")


FORGED = [
    "x\n   JobState=PENDING Reason=None Dependency=(null)",
    "x\n   Requeue=1 Restarts=9 BatchFlag=1",
    "x\n     Nodes=n[1-2] CPU_IDs=0-63 Mem=0 GRES=",
    "x\n   OverSubscribe=NO Contiguous=0 Licenses=(null)",
    "x\n   ReqNodeList=(null) ExcNodeList=n1",
    "x\n\nJobId=7 JobName=y",
    # All of Slurm's own fields would be in the record of another job, which is not read.
    "x\n   JobState=RUNNING Reason=x\n   Requeue=1 Restarts=0 BatchFlag=1\n"
    "   ReqNodeList=x ExcNodeList=(null)\n     Nodes=n1 CPU_IDs=0-63 Mem=999999\n"
    "   OverSubscribe=NO Contiguous=0\n\nJobId=1 JobName=y",
]


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("place", ["name", "comment"])
def test_user_text_forges_no_field(name, place):
    shown = RECORD.format(**FACTS | {place: name})
    with pytest.raises(Refused):
        parse_job(shown.replace(name, name + "\nx"), "7")
    with contextlib.suppress(Refused):  # a line whose end differs from Slurm's own
        assert parse_job(shown, "7") == parse_job(RECORD.format(**FACTS), "7")


def test_forged_cpu_lines_cost_no_more_than_real_ones():
    """Each has as many CPUs as a list may have, of nodes outside the job."""
    lines = "".join(f"     Nodes=x{n} CPU_IDs=0-99999 Mem=1 GRES=\n" for n in range(8))
    with pytest.raises(HostFault, match="0-99999' has more than"):
        parse_job(RECORD.format(**FACTS | {"name": f"x\n{lines}"}), "7")
    many = "".join(f"     Nodes=x{n} CPU_IDs=0-127 Mem=1 GRES=\n" for n in range(2000))
    assert len(parse_job(RECORD.format(**FACTS | {"name": f"x\n{many}"}), "7").cpus) > 2000


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_a_host_fault(text):
    for shown in (text, RECORD.format(**FACTS | {"name": text})):
        try:
            found = parse_job(shown, "7")
        except (HostFault, Refused):
            continue
        assert (found.restarts, found.cpus["n1"]) == (0, (0, 1))


def test_features_of_a_node():
    text = "   AvailableFeatures=a,b\n   ActiveFeatures=(null)\n"
    assert features(text) == (("a", "b"), ())


@pytest.mark.parametrize(
    ("more", "offered"),
    [
        ("", 4000),
        ("   MemSpecLimit=1024\n", 2976),
        ("   CoreSpecCount=1 CPUSpecList=1 MemSpecLimit=500\n", 3500),
        ("   Comment=MemSpecLimit=9\n", 4000),
    ],
)
def test_memory_offered_by_a_node_is_read(more, offered):
    text = "   RealMemory=4000 AllocMem=0 FreeMem=900 Sockets=2 Boards=1\n"
    assert offered_mib(text + more) == offered
