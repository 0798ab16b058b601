"""A script in a guest has a plain job's environment, except for differences in the manual."""

import pytest

from surroundings import SCRIPT, differences

pytestmark = pytest.mark.e2e

ERRORS = {  # of the plain job and of the guest's, by the signal that ends the script
    "": (b"", b""),
    "TERM": (b"Terminated\n", b"vtorque: the script was killed by signal 15 (Terminated)\n"),
}
CPUS = "nproc "  # the batch system local binds no process of a plain job to CPUs
# They name the job, or the host of its files; PATH is that of the guest's own profile.
PER_JOB = {"PBS_JOBID", "PBS_NODEFILE", "PBS_JOBCOOKIE", "PATH", "PWD"}


@pytest.mark.parametrize(
    ("end", "code"), [("", 7), pytest.param("TERM", 143, marks=pytest.mark.full)]
)
def test_script_in_a_guest_gets_the_environment_of_a_plain_job(clean, end, code):
    (clean.home / ".bash_profile").write_text("export FROM_PROFILE='a  b'\n")
    (clean.home / ".bash_profile").chmod(0o644)
    more = ("-F", "'one  word' two", "-v", f"END={end},MINE=x y")
    try:
        plain = clean.job(SCRIPT, "-vm", "none", *more)
        guest = clean.job(SCRIPT, *more)
    finally:
        (clean.home / ".bash_profile").unlink()
    plain_id, guest_id = (each.done.stdout.strip() for each in (plain, guest))
    out = plain.out.replace(plain_id, guest_id)  # in the script's name
    assert b"env FROM_PROFILE=a  b\n" in out and b"signal USR1\n" in out
    assert (plain.code, guest.code) == (code, code)
    assert differences(out, guest.out, per_job=PER_JOB, other=[CPUS]) == ([], [])
    assert (plain.err, guest.err) == ERRORS[end]
