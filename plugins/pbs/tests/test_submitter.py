"""Arguments of qsub for a VM job: those of the user and the additions of doc/batch-pbs.md."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fake_pbs_commands
from pbs_harness import OpenPbsHarness, TorqueHarness
from vtorque_core.api import UsageError
from vtorque_core.api.batch_system import Needs
from vtorque_pbs import request_channel
from vtorque_pbs.batch_commands import user_command
from vtorque_pbs.qsub_dialect import TORQUE
from vtorque_pbs.settings import Settings
from vtorque_testing.harness import ProgramResult
from vtorque_testing.submit import run_vsub

BLOB = b'{"v":1}'
TOKEN = "vt1:AHsidiI6MX0"  # the blob, uncompressed, in base64url
NEEDS = Needs(4, 2304, 60)


@pytest.fixture
def torque(tmp_path):
    return TorqueHarness(tmp_path)


@pytest.fixture
def openpbs(tmp_path):
    return OpenPbsHarness(tmp_path)


def golden(harness, argv, content=b"#!/bin/sh\n:\n"):
    """Submit ``argv``; return qsub's arguments, with S for the job shell."""
    (harness.directory / "j.sh").write_bytes(content)
    stdin = b"" if "j.sh" in argv else content
    ended = run_vsub(harness, shlex.split(argv), stdin=stdin, blob=BLOB, needs=NEEDS)
    assert ended.code == 0, ended
    words = harness.last_input().argv
    return " ".join("S" if word == str(harness.paths.jobshell) else word for word in words)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("j.sh", "j.sh -S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T"),
        ("", "-S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T"),
        ("-Nname -l nodes=2,walltime=01:00:00 j.sh",
         "-Nname -l nodes=2,walltime=01:00:00 j.sh -S S -l nodes=2:ppn=4:vtorque -l mem=4608mb "
         "-l walltime=01:01:00 -l other=T"),
        ("j.sh -l nodes=a:ppn=8+2:ppn=4:fast#shared -l mem=9gb",
         "j.sh -l nodes=a:ppn=8+2:ppn=4:fast#shared -l mem=9gb -S S "
         "-l nodes=a:ppn=8:vtorque+2:ppn=4:fast:vtorque#shared -l other=T"),
        ("-l other=mine -l nodes=1:ppn=4:vtorque,pmem=1gb j.sh",
         "-l other=mine -l nodes=1:ppn=4:vtorque,pmem=1gb j.sh -S S -l other=mine+T"),
        ("-l procs=8,vmem=1gb -S /bin/tcsh@h j.sh",
         "-l procs=8,vmem=1gb -S /bin/tcsh@h j.sh -S S -l other=T"),
        ("-l ncpus=6 -z -t 0-3%2 -W depend=afterok:1 -- j.sh",
         "-l nodes=1:ppn=6 -z -t 0-3%2 -W depend=afterok:1 -S S -l nodes=1:ppn=6:vtorque "
         "-l mem=2304mb -l other=T -- j.sh"),
        ("-lmem=9gb,ncpus=6 -N ncpus=6 -v ncpus=6 j.sh",
         "-lmem=9gb,nodes=1:ppn=6 -N ncpus=6 -v ncpus=6 j.sh -S S -l nodes=1:ppn=6:vtorque "
         "-l other=T"),
        ("-I -X", "-I -X -S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T"),
        ("-I -x j.sh arg", "-I -x j.sh arg -S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T"),
        ("-", "-S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T"),
        ("-N x -", "-N x -S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T"),
        ("- -h", "-h -S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T"),
        ("-N - -", "-N - -S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T"),
        ("-N x --", "-N x -S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T --"),
        ("-hN j.sh", "-hN j.sh -S S -l nodes=1:ppn=4:vtorque -l mem=2304mb -l other=T"),
    ],
)  # fmt: skip
def test_torque_qsub_gets_user_arguments_and_additions(torque, argv, expected):
    assert golden(torque, argv).replace(TOKEN, "T") == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("j.sh", "-S S -l select=1:ncpus=4:mem=2304mb:vtorque=True -v V j.sh"),
        ("-N j.sh j.sh",
         "-N j.sh -S S -l select=1:ncpus=4:mem=2304mb:vtorque=True -v V j.sh"),
        ("-l select=2:ncpus=8+1:ncpus=4:mem=4gb -l walltime=60 j.sh",
         "-l select=2:ncpus=8+1:ncpus=4:mem=4gb -l walltime=60 -S S "
         "-l select=2:ncpus=8:mem=2304mb:vtorque=True+1:ncpus=4:mem=4gb:vtorque=True "
         "-l walltime=00:02:00 -v V j.sh"),
        ("-l ncpus=² j.sh", "-l ncpus=² -S S -l mem=2304mb -l vtorque=True -v V j.sh"),
        ("-l ncpus=8 j.sh", "-l ncpus=8 -S S -l mem=2304mb -l vtorque=True -v V j.sh"),
        ("-l nodes=2:ppn=4 j.sh",
         "-l nodes=2:ppn=4 -S S -l nodes=2:ppn=4:vtorque -l mem=4608mb -v V j.sh"),
        ("-J 0-3 -v A=1 -v B=2 j.sh", "-J 0-3 -v A=1 -v B=2 -S S "
         "-l select=1:ncpus=4:mem=2304mb:vtorque=True -v V,B=2 j.sh"),
        ("-", "-S S -l select=1:ncpus=4:mem=2304mb:vtorque=True -v V -"),
        ("-N x -", "-N x -S S -l select=1:ncpus=4:mem=2304mb:vtorque=True -v V -"),
        ("-N n -- /bin/echo 'a b' c", "-N n -S S -l select=1:ncpus=4:mem=2304mb:vtorque=True -v V"),
    ],
)  # fmt: skip
def test_openpbs_qsub_gets_user_arguments_and_additions(openpbs, argv, expected):
    found = golden(openpbs, argv).replace(f"VTORQUE_REQUEST={TOKEN}", "V")
    assert found == expected


def test_openpbs_command_is_submitted_as_a_script(openpbs):
    """``qsub -- command`` ignores -S and would run on the host."""
    run_vsub(openpbs, ["-vm", "ram=1G", "--", "/bin/echo", "it's", "a b", "$x"])
    job = openpbs.last_input()
    assert job.script == b"#!/bin/sh\nexec /bin/echo 'it'\"'\"'s' 'a b' '$x'\n"
    done = subprocess.run(["sh"], input=job.script, capture_output=True, check=True)
    assert done.stdout == b"it's a b $x\n"
    run_vsub(openpbs, ["--", "/bin/echo", "a b"])
    assert openpbs.last_input().argv == ("--", "/bin/echo", "a b"), (
        "a bare-metal command was changed"
    )


def test_directives_count_and_the_command_line_wins(torque):
    text = b"#!/bin/sh\n#PBS -l nodes=1:ppn=8 -l other=d\n#PBS -v A=1 -S /bin/zsh\n:\n"
    found = golden(torque, "j.sh", text)
    assert found.replace(TOKEN, "T") == (
        "j.sh -S S -l nodes=1:ppn=8:vtorque -l mem=2304mb -l other=d+T"
    )
    found = golden(torque, "-l nodes=1:ppn=4 -C '#Q' j.sh", text.replace(b"#PBS -v", b"#Q -v"))
    assert "ppn=4:vtorque" in found and "other=T" in found.replace(TOKEN, "T")


@pytest.mark.parametrize("system", ["torque", "openpbs"])
def test_script_with_a_byte_order_mark_is_refused_for_vm_jobs(request, system):
    """Torque's qsub drops its directives silently."""
    harness = request.getfixturevalue(system)
    (harness.directory / "bom.sh").write_bytes(b"\xef\xbb\xbf#!/bin/sh\n#PBS -vm ram=1G\n")
    (harness.directory / "dos.sh").write_bytes(b"#!/bin/sh\r\n#PBS -vm ram=1G\r\n")
    for script in ("bom.sh", "dos.sh"):
        ended = run_vsub(harness, [script])
        assert ended.code == 2 and b"sed -i" in ended.stderr
    assert run_vsub(harness, ["-vm", "none", "bom.sh"]).code == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Path("/bin/true").read_bytes(), b"is a program"),
        (b"#!/bin/sh\0\necho\n", b"another binary file"),
        (b"#!/bin/sh\recho\r", b"tr '\\r' '\\n' <SCRIPT >NEW"),
        (b"#!/bin/sh\r\necho\r\n", b"sed -i 's/\\r$//' SCRIPT"),
    ],
    ids=["program", "nul", "cr", "crlf"],
)
def test_binary_script_is_refused_with_its_kind(torque, content, said):
    (torque.directory / "j.sh").write_bytes(content)
    ended = run_vsub(torque, ["-vm", "ram=1G", "j.sh"])
    assert (ended.code, said in ended.stderr) == (2, True)


@pytest.mark.parametrize("argv", [["-F", "it's $HOME", "j.sh"], ["f.sh"]])
def test_script_arguments_that_cannot_be_split_are_refused(torque, argv):
    (torque.directory / "j.sh").write_text("#!/bin/sh\n")
    (torque.directory / "f.sh").write_text('#!/bin/sh\n#PBS -F "it\'s"\n')
    ended = run_vsub(torque, ["-vm", "ram=1G", *argv])
    assert (ended.code, b"No closing quotation" in ended.stderr) == (2, True)


def test_shell_of_the_user_is_sent_in_the_request(torque, monkeypatch):
    (torque.directory / "j.sh").write_text("#!/bin/sh\n#PBS -S /bin/zsh\n")
    with_line = torque.system.submitter(torque.site)
    monkeypatch.chdir(torque.directory)
    assert with_line.split(["j.sh"]).shell == "/bin/zsh"
    assert with_line.split(["-S", "/bin/csh@h,/bin/x", "j.sh"]).shell == "/bin/csh"


def test_long_request_is_sent_in_a_variable_with_its_hash(torque):
    blob = os.urandom(5000)
    argv = ["-v", "A=1,B='x,y'", "-l", "other=m"]
    ended = run_vsub(torque, argv, stdin=b":\n", blob=blob)
    assert ended.code == 0
    words = torque.last_input().argv
    value = words[len(words) - 1]
    token = value.removeprefix("VTORQUE_REQUEST=").split(",")[0]
    assert value.endswith(",A=1,B='x,y'"), (
        "a variable follows the quoted value, which Torque would corrupt"
    )
    assert f"other=m+{request_channel.hash_word(token)}" in words
    assert (
        request_channel.torque_blob(
            request_channel.hash_word(token), f"Z=1,VTORQUE_REQUEST=x,{value}"
        )
        == blob
    )


def test_resources_that_torque_would_drop_are_refused(torque):
    ended = run_vsub(torque, ["-l", "file=" + "x" * 2000], stdin=b":\n", blob=BLOB)
    assert ended.code == 2 and b"limit: 1472 bytes" in ended.stderr
    assert torque.last_input() is None


@pytest.mark.parametrize("argv", [["--version"], ["--about"]])
def test_options_that_only_print_are_passed_to_qsub(torque, argv):
    ended = run_vsub(torque, argv)
    assert (ended.code, ended.stderr) == (0, b"") and b"6.1.3" in ended.stdout
    assert torque.last_input().argv == tuple(argv)


@pytest.mark.parametrize("argv", [["a", "b"], ["-Y"], ["-l"], ["nofile"]])
def test_errors_of_qsub_are_shown_unchanged_and_nothing_runs(torque, argv):
    ended = run_vsub(torque, ["-vm", "ram=1G", *argv])
    bare = run_vsub(torque, ["-vm", "none", *argv])
    assert ended.code == 1 and ended.stderr.startswith(b"qsub: ")
    assert ended.stderr == bare.stderr


@pytest.mark.parametrize("system", ["torque", "openpbs"])
@pytest.mark.parametrize("argv", [["-o"], ["-N", "x", "-l"], ["-h", "-v"]])
def test_option_without_value_is_rejected_and_runs_no_job_shell(request, system, argv):
    harness = request.getfixturevalue(system)
    harness.paths.jobshell.write_text("#!/bin/sh\n")  # like on a node, where qsub could submit it
    ended = run_vsub(harness, argv, stdin=b":\n", blob=BLOB, needs=NEEDS)
    assert ended.code != 0 and f"option {argv[-1]} requires argument".encode() in ended.stderr
    assert harness.last_input() is None


@pytest.mark.parametrize("argv", [["-Y"], ["j.sh", "-Y", "-S", "/bin/sh"], ["-Y", "value", "-"]])
def test_job_with_an_option_unknown_to_vsub_gets_the_job_shell(torque, argv):
    torque.answer(ProgramResult(0, b"1.server\n", b""))
    assert run_vsub(torque, argv, stdin=b":\n").code == 0
    shell = torque.paths.jobshell
    assert torque.last_input().argv == ("-S", str(shell), *argv, f"-S{shell}")


def test_vm_without_a_value_submits_nothing(torque):
    ended = run_vsub(torque, ["j.sh", "-vm"])
    assert (ended.code, ended.stderr) == (2, b"vsub: -vm needs a value\n")
    assert torque.last_input() is None


WORDS = ["-", "--", "-N", "-Nn", "-hN", "-hj", "-C", "-I", "-x", "-z", "x", "", "j.sh", "--a"]


@given(st.lists(st.sampled_from(WORDS)))
def test_find_script_agrees_with_torques_qsub(argv):
    place = TORQUE.find_script(argv)
    assert ("" if place is None else argv[place]) == fake_pbs_commands.find_job_script(argv)


@pytest.mark.parametrize("argv", [["-hA", "-"], ["-hA", "-N"]])
def test_command_line_that_makes_the_job_shell_the_script_is_refused(torque, argv):
    """Torque's qsub looks at the first letter of ``-hA`` only, so the value becomes an option."""
    ended = run_vsub(torque, argv, stdin=b":\n", blob=BLOB, needs=NEEDS)
    assert ended.code == 2 and b"qsub would use" in ended.stderr
    assert torque.last_input() is None


@pytest.mark.parametrize(
    ("argv", "blob", "found"),
    [
        (["-I", "-V", "-X"], BLOB, "localhost:10.0"),
        (["-I", "-VX"], BLOB, "localhost:10.0"),
        (["-I", "-V"], BLOB, ""),
        (["-I", "-V"], None, "localhost:10.0"),
        (["-V", "j.sh"], BLOB, "localhost:10.0"),
    ],
)
def test_interactive_vm_job_gets_the_display_only_on_request(torque, argv, blob, found):
    """The job shell passes on its display; -V would pass that of the login."""
    (torque.directory / "j.sh").write_bytes(b"#!/bin/sh\n:\n")
    torque.environ["DISPLAY"] = "localhost:10.0"
    needs = NEEDS if blob else None
    assert run_vsub(torque, argv, blob=blob, needs=needs).code == 0
    assert torque.last_input().environ["DISPLAY"] == found


def test_pbs_vm_directive_is_removed_from_a_copy_with_the_same_name(torque):
    text = b"#!/bin/sh\n#PBS -vm ram=2G\n#PBS -N x\necho $0\n\xff"
    (torque.directory / "j.sh").write_bytes(text)
    for argv in (["j.sh"], ["-vm", "none", "j.sh", "-o", "j.sh"], ["-o", "j.sh", "j.sh"]):
        assert run_vsub(torque, argv).code == 0
        job = torque.last_input()
        assert job.script == text.replace(b"#PBS -vm ram=2G\n", b"")
        assert [word for word in job.argv if word.endswith("/j.sh")]
        assert (job.argv.count("j.sh") == 1) == ("-o" in argv)


def test_command_missing_in_path_is_found_as_by_root(tmp_path, monkeypatch):
    """Programs that run for a user on a job's node do not have the user's PATH."""
    monkeypatch.setenv("PATH", "/nowhere")
    places = [str(tmp_path / "none"), str(tmp_path)]
    with pytest.raises(UsageError, match=r"qstat: not found in PATH; set \[plugin.pbs\] bindir"):
        user_command(Settings(), "qstat", places)
    (tmp_path / "qstat").touch(mode=0o755)
    assert user_command(Settings(), "qstat", places) == str(tmp_path / "qstat")


def test_jobs_are_listed_with_reasons_and_canceled(torque, monkeypatch):
    run_vsub(torque, ["-N", "one<b>", "-v", "A=<Job_Name>evil</Job_Name>"], stdin=b":\n")
    job = torque.last_input()
    monkeypatch.setenv("PATH", torque.environ["PATH"])
    infos = torque.system.submitter(torque.site).jobs()
    assert [(info.id, info.name, info.state) for info in infos] == [(job.job_id, "one<b>", "Q")]
    torque.pbs.job(job.job_id, comment="Not Running: no node")
    (info,) = torque.system.submitter(torque.site).jobs()
    assert (info.nodes, info.reason) == ((), "Not Running: no node")
    torque.pbs.job(job.job_id, state="R", exec_host="n1/0-1+n3/0")
    (info,) = torque.system.submitter(torque.site).jobs()
    assert (info.node, info.nodes, info.reason) == ("n1", ("n1", "n3"), "")
    torque.pbs.job(job.job_id, state="S")  # qsig -s suspend
    (info,) = torque.system.submitter(torque.site).jobs()
    assert info.nodes == ("n1", "n3")
    torque.pbs.job(job.job_id, state="C")
    (info,) = torque.system.submitter(torque.site).jobs()
    assert (info.node, info.nodes) == ("n1", ()), "a completed job has nodes to query"
    torque.pbs.job(job.job_id, state="R")
    assert torque.system.submitter(torque.site).cancel(job.job_id) == 0
    assert torque.pbs.state()["jobs"][job.job_id]["deleted"]
    assert torque.system.submitter(torque.site).cancel("99.server") == 153


def test_golden_token_decodes_to_the_request():
    assert request_channel.torque_blob(TOKEN, "") == BLOB


@pytest.mark.parametrize(("blob", "seen"), [(BLOB, True), (None, False)])
def test_commands_of_the_site_are_added_to_pbs_o_path_of_vm_jobs(torque, blob, seen):
    """The PBS_O_PATH of a bare-metal job is unchanged."""
    torque.environ["PATH"] = "/usr/bin:/bin"
    needs = NEEDS if blob else None
    assert run_vsub(torque, ["-N", "x"], stdin=b":\n", blob=blob, needs=needs).code == 0
    path = torque.last_input().environ["PATH"]
    assert path == "/usr/bin:/bin" + seen * f":{torque.pbs.bin}"


NCPUS = b"#!/bin/sh\n#PBS -N 'a  b' -l ncpus=8,mem=9gb\n#PBS -v ncpus=8\n#PBS -l walltime=1:00\n:\n"


@pytest.mark.parametrize("argv", [["j.sh"], []])
def test_torque_script_with_ncpus_gets_nodes_instead(torque, argv):
    """With nodes and ncpus qsub rejects the job; without nodes no property can be requested."""
    (torque.directory / "j.sh").write_bytes(NCPUS)
    done = run_vsub(torque, argv, stdin=b"" if argv else NCPUS, blob=BLOB, needs=NEEDS)
    assert done.code == 0, done
    got = torque.last_input()
    more = ["nodes=1:ppn=8:vtorque", "walltime=00:02:00", f"other={TOKEN}"]
    assert [word for word in got.argv if "=" in word] == more
    lines = got.script.splitlines()
    assert lines[1] == b"#PBS -N 'a  b' -l nodes=1:ppn=8,mem=9gb"
    assert lines[0] + lines[2] + lines[3] == b"#!/bin/sh#PBS -v ncpus=8#PBS -l walltime=1:00"


def test_ncpus_of_a_bare_metal_job_is_not_changed(torque):
    done = run_vsub(torque, ["-vm", "none", "-l", "ncpus=2"], stdin=NCPUS)
    got = torque.last_input()
    assert (done.code, got.script, got.argv) == (0, NCPUS, ("-l", "ncpus=2"))


def test_invalid_ncpus_is_left_to_qsub(torque):
    """int("\u00b2") fails, "\u00b2".isdigit() is true."""
    done = run_vsub(torque, ["-l", "ncpus=\u00b2"], stdin=b":\n", blob=BLOB, needs=NEEDS)
    assert done.code == 1 and b"may not mix" in done.stderr


@pytest.mark.parametrize(
    ("system", "argv", "added"),
    [
        ("torque", ["-l", "nodes=1:ppn=8"], "nodes=1:ppn=8:vtorque"),
        ("openpbs", ["-l", "select=1:ncpus=8"], "select=1:ncpus=8:vtorque=True"),
        ("openpbs", ["-l", "ncpus=8"], "vtorque=True"),
        ("openpbs", ["-l", "nodes=1:ppn=8"], "nodes=1:ppn=8:vtorque"),
    ],
)
def test_guests_sized_by_the_allocation_request_no_memory(request, system, argv, added):
    harness = request.getfixturevalue(system)
    needs = Needs(8, None, 60)
    assert run_vsub(harness, argv, stdin=b":\n", blob=BLOB, needs=needs).code == 0
    got = [word for word in harness.last_input().argv[2:] if "=" in word]
    assert [word for word in got if not word.startswith(("other", "VTORQUE"))] == [added]
