"""What qstat and pbsnodes say, as attributes."""

from vtorque_pbs import job_records


def test_what_users_write_is_no_other_job_of_openpbs() -> None:
    """As OpenPBS 23.06.06 answered ``qstat -ftw``; without -w the lines are there as such."""
    job, last = job_records.openpbs_jobs(
        "Job Id: 205.head\n    Job_Owner = alice@head\n    job_state = Q\n"
        "    Variable_List = PBS_O_HOME=/root,A=x\\nJob Id: 99.head\\n    Job_Owner = bob@head\\n"
        "    job_state = R,PBS_O_QUEUE=workq\n    euser = alice\n\n"
        "Job Id: 206.head\n    Job_Owner = carol@head\n\n"
    )
    assert (job["Job_Id"], job["Job_Owner"], job["job_state"]) == ("205.head", "alice@head", "Q")
    assert last["Job_Owner"] == "carol@head"
