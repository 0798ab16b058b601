import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api import Refused, UsageError
from vtorque_core.api.batch_system import Outcome
from vtorque_pbs import convention as pbs

WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


def test_hook_arguments_are_torques():
    argv = ["42.srv", "u", "users", "job", "nodes=1", "batch", "acct", "/var/spool/42.srv.SC"]
    args = pbs.PrologueArgs.parse(argv)
    assert (args.job_id, args.resources, args.queue, args.script) == (
        "42.srv",
        "nodes=1",
        "batch",
        "/var/spool/42.srv.SC",
    )
    assert args.argv() == argv
    argv = [
        "42.srv",
        "u",
        "users",
        "job",
        "4711",
        "nodes=1",
        "cput=0",
        "batch",
        "acct",
        "271",
        "/sc",
    ]
    end = pbs.EpilogueArgs.parse(argv)
    assert (end.session, end.used, end.exit_status, end.script) == ("4711", "cput=0", "271", "/sc")
    assert end.argv() == argv


@pytest.mark.parametrize("argv", [[], ["1", "u", "g"], ["1"] * 9, ["", "u", "g", "n", "r", "q"]])
def test_wrong_number_of_arguments_is_refused(argv):
    with pytest.raises(ValueError, match=r"arguments|the job id"):
        pbs.PrologueArgs.parse(argv)


def test_resource_list_of_torque_is_parsed():
    seen = "nodes=1:ppn=1,other=vt1:AbC_d-123,neednodes=a:ppn=1,gres=x,y,walltime=01:00:00"
    found = pbs.parse_resources(seen)
    assert found["gres"] == "x,y" and found["walltime"] == "01:00:00"
    assert pbs.request_token(found) == "vt1:AbC_d-123"
    assert pbs.build_resources(found) == seen
    assert pbs.request_token(pbs.parse_resources("other=mine,vt1:X,nodes=1")) == "vt1:X"
    assert pbs.request_token({"other": "notvt1:X"}) is None
    assert pbs.request_token({}) is None


@given(st.text(max_size=60))
def test_any_resource_list_is_parsed(text):
    pbs.request_token(pbs.parse_resources(text))


@pytest.mark.parametrize(
    ("nodes", "count"),
    [("1", 1), ("1:ppn=2", 2), ("2:big:ppn=16+3:ppn=4", 16), ("n1+n2:ppn=8", 1), ("1:ppn=x", 1)],
)
def test_ppn_is_parsed_from_the_nodes_request(nodes, count):
    assert pbs.ppn(nodes) == count


@pytest.mark.parametrize(
    ("text", "mib"),
    [("2gb", 2048), ("512MB", 512), ("1kb", 1), ("1025kb", 2), ("1mw", 8), ("1", 1)],
)
def test_memory_size_is_converted_to_mib(text, mib):
    assert pbs.mem_mib(text) == mib


@pytest.mark.parametrize("text", ["", "0", "-1gb", "1.5gb", "1eb", "1gb,x", "1" * 99])
def test_bad_memory_size_is_rejected(text):
    with pytest.raises(ValueError, match="is not a size"):
        pbs.mem_mib(text)


def test_prologue_exit_codes_of_bad_requests_keep_the_node_online():
    for outcome in (Outcome.READY, Outcome.REFUSED, Outcome.NOT_OURS):
        assert pbs.prologue_exit(outcome, elsewhere=True) == 0
    assert pbs.prologue_exit(Outcome.HOST_FAULT, elsewhere=True) == 2
    assert pbs.prologue_exit(Outcome.HOST_FAULT, elsewhere=False) == 0


@pytest.mark.parametrize(
    ("returncode", "status", "code"),
    [(0, 0, 0), (42, 42, 42), (255, 255, 255), (-9, 265, 137), (-15, 271, 143)],
)
def test_exit_status_is_converted_to_that_of_pbs_and_back(returncode, status, code):
    assert pbs.status_of(returncode) == status
    assert pbs.shell_code(status) == code


def test_codes_of_jobs_that_torque_ended():
    assert pbs.shell_code(pbs.STATUS_WALLTIME) == 143
    assert pbs.shell_code(pbs.STATUS_NO_START) == 254


def test_split_as_torques_getopt():
    argv = ["-Nname", "job.sh", "-l", "a=1,b=2", "-hV", "-vA=1", "-Wblock=true", "--", "-x"]
    found = pbs.split_qsub(argv)
    assert found.options == (
        ("N", "name"),
        ("l", "a=1,b=2"),
        ("h", ""),
        ("V", ""),
        ("v", "A=1"),
        ("W", "block=true"),
    )
    assert found.operands == ("job.sh",) and found.command == ("-x",)
    assert found.vm == () and found.rest == tuple(argv)


def test_vm_is_parsed_only_as_an_option():
    found = pbs.split_qsub(["-vm", "ram=1G", "-v", "m", "-vmore", "-vm=1", "-N", "-vm", "-vm", "x"])
    assert found.vm == ("ram=1G", "x")
    assert found.options == (("v", "m"), ("v", "more"), ("v", "m=1"), ("N", "-vm"))
    assert found.rest == ("-v", "m", "-vmore", "-vm=1", "-N", "-vm")
    assert pbs.split_qsub(["--", "-vm"]).vm == ()


@pytest.mark.parametrize("argv", [["-vm"], ["-N"], ["-y"], ["-hy"], ["-IN"]])
def test_split_names_the_bad_option(argv):
    with pytest.raises(UsageError, match=rf"-{argv[0][-1]}|-vm"):
        pbs.split_qsub(argv)


def test_openpbs_flags_are_parsed():
    found = pbs.split_qsub(["-zfR", "x", "--", "sleep", "1"], pbs.OPENPBS_GETOPT)
    assert found.options == (("z", ""), ("f", ""), ("R", "x")) and found.command == ("sleep", "1")


@given(st.lists(st.sampled_from(["-N", "-vm", "-I", "-x", "a", "", "-", "--", "-vA", "-lb"])))
def test_split_removes_only_vm(argv):
    try:
        found = pbs.split_qsub(argv)
    except UsageError:
        return
    assert len(found.rest) + 2 * len(found.vm) == len(argv)


def test_variable_list_is_parsed_with_quotes_and_defaults():
    env = {"C": "see", "D": "no"}
    found = pbs.variable_list("A=1,B='x,y',C,E=,F=a=b,G=\\,,H=\"p q\"\n,UNSET", env)
    assert found == {
        "A": "1",
        "B": "x,y",
        "C": "see",
        "E": "",
        "F": "a=b",
        "G": ",",
        "H": "p q\n",
    }
    assert pbs.variable_list("A=one\ntwo", {}) == {"A": "one\ntwo"}
    for bad in ("=1", "A='x", "A=\0"):
        with pytest.raises(UsageError):
            pbs.variable_list(bad, {})


@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,5}", fullmatch=True), st.text(), max_size=5))
def test_quoted_variables_are_read_back(variables):
    variables = {name: value.replace("\0", "") for name, value in variables.items()}
    quoted = {name: value.replace("'", "'\\''") for name, value in variables.items()}
    text = ",".join(f"{name}='{value}'" for name, value in quoted.items())
    assert pbs.variable_list(text, {}) == variables


@pytest.mark.parametrize("name", ["", "1x", "a b", "a/b", "a\n", "é", "a" * 231, "-x"])
def test_bad_job_names_are_rejected(name):
    with pytest.raises(UsageError, match="-N"):
        pbs.check_job_name(name)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xef\xbb\xbf#!/bin/sh\n#PBS -l walltime=1\n", "byte order mark"),
        (b"\xe2\x80\x8b#!/bin/sh\n", "invisible character"),  # U+200B, from a web page
        (b"\xc2\xa0 #!/bin/sh\n", "invisible character"),
        (b"\xa0#!/bin/sh\n", "invisible character"),  # Latin-1
        (b"#!/bin/sh\r\n#PBS -vm ram=1G\r\ntrue\r\n", "DOS"),
        (b"#!/bin/sh\rtrue\r", "CR line ends"),
    ],
)
def test_script_that_hides_its_directives_is_refused(content, why):
    with pytest.raises(Refused, match=f"{why}.*(sed -i|tr )"):
        pbs.check_script(content)


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08\x08abc", b"\x7fELF\x02\x01\x01\0\n"])
def test_binary_file_is_refused_as_script(content):
    with pytest.raises(Refused, match="binary file"):
        pbs.check_script(content)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_script_in_utf16_or_utf32_is_refused_with_the_iconv_command(encoding):
    with pytest.raises(Refused, match=r"UTF-16 or UTF-32, .*iconv -f UTF-16 -t UTF-8"):
        pbs.check_script("#!/bin/sh\n".encode(encoding))


def test_other_scripts_are_accepted():
    for content in (b"", b"#!/bin/sh\necho a\r\n", b"\xef#", b"\x7fELF\n", b"\n\r\n"):
        pbs.check_script(content)


@pytest.mark.parametrize(
    "script", ["01_align.sh", "2nd", "_x.sh", ".hidden", "-x", "é.sh", "%j", "~", "a" * 300, "#!"]
)
def test_every_script_name_makes_a_job_name(script):
    """Torque and OpenPBS check only a name that is given with -N."""
    assert pbs.is_job_name(pbs.default_job_name(f"/scratch/{script}"))


def test_names_of_jobs_and_outputs():
    assert pbs.check_job_name("Job_1.x") == "Job_1.x"
    assert pbs.default_job_name("/a/my job\n.sh") == "my_job_.sh"
    assert pbs.default_job_name(None) == "STDIN"
    assert pbs.output_names("n", "22[0].server") == ("n.o22-0", "n.e22-0")


def test_directive_words_and_walltime():
    assert pbs.directive_words("-N 'a b' -j oe") == ["-N", "a b", "-j", "oe"]
    with pytest.raises(UsageError, match="quotation"):
        pbs.directive_words("-N 'a")
    assert pbs.show_walltime(90061) == "25:01:01"
