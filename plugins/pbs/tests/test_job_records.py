"""Attributes from the output of qstat and pbsnodes."""

import json

import pytest

from vtorque_core.api.batch_system import JobInfo
from vtorque_pbs import job_records
from vtorque_pbs.qsub_dialect import OPENPBS, TORQUE


def test_text_of_a_user_is_not_read_as_another_openpbs_job() -> None:
    """Answer of OpenPBS 23.06.06 to ``qstat -ftw``; without -w it wraps long lines."""
    job, last = job_records.openpbs_jobs(
        "Job Id: 205.head\n    Job_Owner = alice@head\n    job_state = Q\n"
        "    Variable_List = PBS_O_HOME=/root,A=x\\nJob Id: 99.head\\n    Job_Owner = bob@head\\n"
        "    job_state = R,PBS_O_QUEUE=workq\n    euser = alice\n\n"
        "Job Id: 206.head\n    Job_Owner = carol@head\n\n"
    )
    assert (job["Job_Id"], job["Job_Owner"], job["job_state"]) == ("205.head", "alice@head", "Q")
    assert last["Job_Owner"] == "carol@head"


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        (
            TORQUE,
            "<Data><Job><Job_Id>9.srv</Job_Id><Job_Name>a</Job_Name><Job_Owner>ada@s</Job_Owner>"
            "<resources_used><walltime>00:01:01</walltime></resources_used>"
            "<job_state>{}</job_state><exec_host>n1/0</exec_host>"
            "<exit_status>271</exit_status></Job></Data>",
        ),
        (
            OPENPBS,
            "Job Id: 9.srv\n    Job_Name = a\n    Job_Owner = ada@s\n    job_state = {}\n"
            "    resources_used.walltime = 00:01:01\n    exec_host = n1/0\n"
            "    Exit_status = 271\n\n",
        ),
    ],
)
@pytest.mark.parametrize(("state", "ended"), [("C", True), ("F", True), ("X", True), ("E", False)])
def test_completed_job_kept_by_the_server_has_ended(tmp_path, dialect, answer, state, ended):
    """Torque keeps completed jobs (keep_completed), OpenPBS with job_history_enable."""
    qstat = tmp_path / "qstat"
    qstat.write_text(f"#!/usr/bin/env python3\nprint({json.dumps(answer.format(state))})\n")
    qstat.chmod(0o755)
    (job,) = job_records.job_infos(dialect, str(qstat))
    assert job == JobInfo(
        "9.srv", "a", "ada", state, "n1", 61.0, "exit code 271", ended=ended, exit_code=271
    )
