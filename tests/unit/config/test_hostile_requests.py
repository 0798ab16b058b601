"""Requests written by hand, and the exact refusal of each.

The node reads all of this as root. Every refusal is one printable line; nothing else is raised.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostile_requests import BLOBS, DAMAGED, PAIRS, SITE, TOKENS, document
from vtorque_core.api import vm_options
from vtorque_core.api.submission import from_token
from vtorque_core.api.values import FileData
from vtorque_core.base import names
from vtorque_core.base.errors import Refused, UsageError
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import decide
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml
from vtorque_pbs import convention as pbs


@pytest.mark.parametrize("name", BLOBS)
def test_hostile_bytes_are_refused_with_the_expected_message(name):
    blob, words = BLOBS[name]
    with pytest.raises(Refused) as caught:
        Request.decode(blob)
    assert str(caught.value) == DAMAGED + words


def test_number_with_too_many_digits_is_refused():
    with pytest.raises(Refused) as caught:
        Request.decode(b'{"v":' + b"1" * 100_000 + b"}")
    assert str(caught.value).startswith(DAMAGED) and str(caught.value).isprintable()


@pytest.mark.parametrize("name", TOKENS)
def test_hostile_tokens_are_refused_with_the_expected_message(name):
    text, words = TOKENS[name]
    with pytest.raises(Refused) as caught:
        from_token(text)
    assert str(caught.value) == DAMAGED + words


@pytest.fixture(scope="module")
def loaded_plugins():
    made = Plugins()
    made.register("core", vm_options, "vtorque-core")
    return made


@pytest.fixture(scope="module")
def site(loaded_plugins):
    return build(parse_toml(SITE, Path("/etc/vtorque/vtorque.toml")), loaded_plugins)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: ascii("=".join(pair)))
def test_hostile_values_are_refused_with_the_expected_message(pair, site, loaded_plugins):
    key, value = pair
    shown = value.replace("\n", "\\n").replace("\x1b", "\\x1b")
    with pytest.raises(Refused) as caught:
        decide(Request.decode(document(vm=[list(pair)])), site, loaded_plugins)
    assert str(caught.value) == f"{key}={shown}: {PAIRS[pair]}"


def test_file_in_place_of_text_and_text_in_place_of_file_are_refused(site, loaded_plugins):
    with pytest.raises(Refused) as caught:
        decide(Request(files={"img": FileData("micro", b"")}), site, loaded_plugins)
    assert str(caught.value) == "img=micro: the value must be text, not a file"


# -- the batch system's arguments -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "got 0 arguments, but Torque passes 6 to 8"),
        (["1.x"], "got 1 arguments, but Torque passes 6 to 8"),
        (["x"] * 12, "got 12 arguments, but Torque passes 6 to 8"),
        (["", "u", "g", "n", "r", "q"], "the first two arguments must be the job id and the user"),
        (
            ["1.x", "", "g", "n", "r", "q"],
            "the first two arguments must be the job id and the user",
        ),
    ],
)
def test_hostile_hook_arguments_are_refused(argv, words):
    with pytest.raises(ValueError) as caught:
        pbs.PrologueArgs.parse(argv)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("resources", "word"),
    [
        ("nodes=1,other=vt1:a,other=vt1:b", "vt1:b"),  # Torque: the last of a key counts
        ("other=x,vt1:a,vt1:b", "vt1:a"),  # the first word of it
        ("other=VT1:a", None),
        ("walltime=vt1:a", None),
        ("nodes=vt1:a", None),
        ("vt1:a", None),
    ],
)
def test_request_token_is_found_among_hostile_resources(resources, word):
    assert pbs.request_token(pbs.parse_resources(resources)) == word


@pytest.mark.parametrize(
    "text", ["1:ppn=99999999", "1:ppn=-4", "1:ppn=\u0661", "1+1:ppn=8", "1:ppn="]
)
def test_hostile_processor_counts_are_read_as_1(text):
    assert pbs.ppn(text) == 1


@pytest.mark.parametrize(
    "name", ["a/b", "../x", "-rf", "a b", "a\n", "", "x" * 231, "\u00e9", ".x"]
)
def test_hostile_job_names_are_refused(name):
    with pytest.raises(
        UsageError, match="a job name must start with a letter and have at most 230"
    ):
        pbs.check_job_name(name)


@pytest.mark.parametrize(
    "job_id",
    [
        "../../etc",
        "..",
        ".",
        "",
        "/",
        "-rf",
        "1\n2",
        "a\0b",
        "x" * 300,
        "\udcff",
        "1;reboot",
        "$(id)",
    ],
)
def test_paths_of_hostile_job_ids_stay_in_their_directory(job_id):
    paths = names.Paths(Path("/s"), Path("/r"))
    key = names.job_key(job_id, 0)
    for path, parent in (
        (paths.job_state(key), "/s/jobs"),
        (paths.job_run(key), "/r/jobs"),
        (paths.proof(job_id), "/r/proof"),
        (paths.job_lock(job_id), "/r/locks"),
    ):
        assert os.path.normpath(path) == str(path)
        assert str(path.parent) == parent
        assert path.name.isascii() and path.name.isprintable() and len(path.name) < 80
        assert not path.name.startswith((".", "-"))


def test_hostile_job_ids_have_distinct_paths():
    ids = ["1[0].s", "1_0_.s", "1/0/.s", "1 0 .s", "1\n0\n.s", "x" * 51, "x" * 52]
    assert len({names.safe_name(each) for each in ids}) == len(ids)
