"""Forged requests in each batch system's channel: root's side reads them, as root.

Users can change Slurm's comment, Torque's resource list and variables, OpenPBS's variables; and
with the embedded batch system the whole message to its socket.
"""

from __future__ import annotations

import pytest

from guards import guards, without
from hostile_requests import DAMAGED, TOKENS
from vtorque_core.api.submission import to_token
from vtorque_core.base.errors import Refused, VtorqueError
from vtorque_core.config.request import Request
from vtorque_pbs import convention as pbs
from vtorque_pbs import request_channel as pbs_channel
from vtorque_pbs.qsub_dialect import VARIABLE
from vtorque_slurm import request_channel as slurm_channel
from vtorque_slurm.node import SlurmNode
from vtorque_slurm.settings import Settings

MINE = to_token(Request((("ram", "1G"),)).encode())
THEIRS = to_token(Request((("ram", "64G"),)).encode())
GONE = f"variable {VARIABLE} is missing or changed"
NO_TOKEN = DAMAGED + "it is not a vt1 token"


def torque(resources: str, variables: str = "") -> bytes:
    word = pbs_channel.torque_word(pbs.parse_resources(resources))
    assert word is not None
    return pbs_channel.torque_blob(word, variables)


HASH = pbs_channel.hash_word(MINE)
TORQUE = {
    "a hash without its variable": (f"other={HASH}", "", GONE),
    "another request under the hash": (f"other={HASH}", f"{VARIABLE}={THEIRS}", GONE),
    "a longer one": (f"other={HASH}", f"{VARIABLE}={MINE}A", GONE),
    "a variable of nearly that name": (f"other={HASH}", f"X{VARIABLE}={MINE}", GONE),
    "in another's value": (f"other={HASH}", f"A='{VARIABLE}={MINE}'", GONE),
    "the hash's own text": (f"other={HASH}", f"{VARIABLE}={HASH}", GONE),
    "a hash that is none": ("other=vt1v:", f"{VARIABLE}=", GONE),
    "a hash of nothing": (f"other={pbs_channel.hash_word('')}", f"{VARIABLE}=", NO_TOKEN),
    "a word of both kinds": (f"other=vt1:{HASH}", f"{VARIABLE}={MINE}", NO_TOKEN),
    "cut at Torque's buffer": (f"other={MINE[:-9]}", "", DAMAGED),
    "two words, the first bad": (f"other=vt1:!+{MINE}", "", NO_TOKEN),
    "with the next resource": (f"other={MINE}=1,mem=1", "", NO_TOKEN),
}


@pytest.mark.parametrize("name", TORQUE)
def test_forged_torque_resources_and_variables_are_refused(name):
    resources, variables, words = TORQUE[name]
    with pytest.raises(Refused) as caught:
        torque(resources, variables)
    assert words in str(caught.value) and str(caught.value).isprintable()


def test_hash_selects_the_real_torque_request():
    """The owner may add variables of the same name; only the request with the hash is accepted."""
    variables = f"A=1,{VARIABLE}={THEIRS},B='x,{VARIABLE}={MINE},{VARIABLE}={HASH}"
    assert (
        torque(f"mem=1gb,other=gres+{HASH},nodes=1", variables)
        == Request.decode(torque(f"other={MINE}")).encode()
    )


def test_forged_torque_variable_is_accepted_without_the_hash_check(monkeypatch):
    monkeypatch.setattr(pbs_channel, "hash_word", lambda token: HASH)
    assert Request.decode(torque(f"other={HASH}", f"{VARIABLE}={THEIRS}")).pairs[0][1] == "64G"
    (guard,) = [g for g in guards(pbs_channel, ("torque_blob",)) if "missing or changed" in g.text]
    monkeypatch.undo()
    with without(guard), pytest.raises(TypeError):
        torque(f"other={HASH}", f"{VARIABLE}={THEIRS}")


@pytest.fixture
def slurm(tmp_path):
    return SlurmNode(Settings(), tmp_path, tmp_path)


SCRIPTS = {
    "no line of ours": b"#!/bin/sh\necho\n",
    "ours below others": b"#!/bin/sh\n\n#VTORQUE-REQUEST " + MINE.encode() + b"\n",
    "ours without a script": b"#VTORQUE-REQUEST " + MINE.encode() + b"\n",
    "cut off": b"#!/bin/sh\n#VTORQUE-REQUEST vt1:AAAA",
    "more on the line": b"#!/bin/sh\n#VTORQUE-REQUEST " + MINE.encode() + b" x\n",
    "a NUL in it": b"#!/bin/sh\n#VTORQUE-REQUEST vt1:AA\0AA\n",
    "bytes that are no text": b"#!/bin/sh\n#VTORQUE-REQUEST vt1:\xff\xfe\n",
    "ends of lines of DOS": b"#!/bin/sh\r\n#VTORQUE-REQUEST " + MINE.encode() + b"\r\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_forged_slurm_script_is_refused(slurm, name, monkeypatch):
    text = SCRIPTS[name].decode("utf-8", "surrogateescape")
    monkeypatch.setattr(type(slurm._client), "ask", lambda *_: text)
    with pytest.raises(Refused) as caught:
        slurm._request("7", slurm_channel.IN_SCRIPT)
    assert str(caught.value) == NO_TOKEN


# A word in a comment is found by the blank before it.
@pytest.mark.parametrize("name", sorted(TOKENS.keys() - {"in front of it"}))
def test_forged_slurm_comment_is_refused(slurm, name):
    """If it is found; otherwise there is no VM job, and its shell finds no proof."""
    word = slurm_channel.find(f"a comment of mine {TOKENS[name][0]}")
    if word is not None:
        with pytest.raises(Refused, match="the job's request is invalid"):
            slurm._request("7", word)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"{THEIRS} {MINE}", MINE),  # ours comes last, as vsub writes it
        (f"x{MINE}", None),
        (f"vt1:in-script {MINE}", MINE),
        (f"{MINE}\nvt1:in-script", "vt1:in-script"),
    ],
)
def test_slurm_comment_with_other_words_uses_the_last_request_word(text, word):
    assert slurm_channel.find(text) == word


def test_slurm_user_with_another_uid_on_the_node_is_refused():
    """A number that is another user's here would start another user's guest."""
    with pytest.raises(VtorqueError, match="mallory with uid 0, but on this node the uid is root"):
        slurm_channel.trusted_owner("mallory", 0)
    (guard,) = guards(slurm_channel, ("trusted_owner",))
    with without(guard):
        assert slurm_channel.trusted_owner("mallory", 0) == "root"
