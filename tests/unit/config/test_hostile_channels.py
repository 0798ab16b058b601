"""Forged requests in each batch system's channel, which root reads.

Users can change Slurm's comment, Torque's resource list and variables, OpenPBS's variables, and the
whole message to the socket of the batch system ``local``.
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
    "hash without a variable": (f"other={HASH}", "", GONE),
    "hash with another request in the variable": (f"other={HASH}", f"{VARIABLE}={THEIRS}", GONE),
    "hash with a longer request in the variable": (f"other={HASH}", f"{VARIABLE}={MINE}A", GONE),
    "hash with a variable of a similar name": (f"other={HASH}", f"X{VARIABLE}={MINE}", GONE),
    "hash with the variable inside another variable's value": (
        f"other={HASH}",
        f"A='{VARIABLE}={MINE}'",
        GONE,
    ),
    "hash with the hash itself in the variable": (f"other={HASH}", f"{VARIABLE}={HASH}", GONE),
    "empty hash": ("other=vt1v:", f"{VARIABLE}=", GONE),
    "hash of an empty request": (f"other={pbs_channel.hash_word('')}", f"{VARIABLE}=", NO_TOKEN),
    "hash in place of the request": (f"other=vt1:{HASH}", f"{VARIABLE}={MINE}", NO_TOKEN),
    "request truncated by Torque's buffer": (f"other={MINE[:-9]}", "", DAMAGED),
    "two requests of which the first is invalid": (f"other=vt1:!+{MINE}", "", NO_TOKEN),
    "request joined with the next resource": (f"other={MINE}=1,mem=1", "", NO_TOKEN),
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
    "no request line": b"#!/bin/sh\necho\n",
    "request line after an empty line": b"#!/bin/sh\n\n#VTORQUE-REQUEST " + MINE.encode() + b"\n",
    "request line without a script": b"#VTORQUE-REQUEST " + MINE.encode() + b"\n",
    "truncated request": b"#!/bin/sh\n#VTORQUE-REQUEST vt1:AAAA",
    "text after the request": b"#!/bin/sh\n#VTORQUE-REQUEST " + MINE.encode() + b" x\n",
    "NUL in the request": b"#!/bin/sh\n#VTORQUE-REQUEST vt1:AA\0AA\n",
    "request that is not UTF-8": b"#!/bin/sh\n#VTORQUE-REQUEST vt1:\xff\xfe\n",
    "DOS line endings": b"#!/bin/sh\r\n#VTORQUE-REQUEST " + MINE.encode() + b"\r\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_forged_slurm_script_is_refused(slurm, name, monkeypatch):
    text = SCRIPTS[name].decode("utf-8", "surrogateescape")
    monkeypatch.setattr(type(slurm._client), "ask", lambda *_: text)
    with pytest.raises(Refused) as caught:
        slurm._request("7", slurm_channel.IN_SCRIPT)
    assert str(caught.value) == NO_TOKEN


# In a comment, a request is found by the space before it.
@pytest.mark.parametrize("name", sorted(TOKENS.keys() - {"leading space"}))
def test_forged_slurm_comment_is_refused(slurm, name):
    """If no request is found in the comment, the job has no guests and no proof."""
    word = slurm_channel.find(f"a comment of mine {TOKENS[name][0]}")
    if word is not None:
        with pytest.raises(Refused, match="the job's request is invalid"):
            slurm._request("7", word)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"{THEIRS} {MINE}", MINE),  # vsub writes its request last
        (f"x{MINE}", None),
        (f"vt1:in-script {MINE}", MINE),
        (f"{MINE}\nvt1:in-script", "vt1:in-script"),
    ],
)
def test_slurm_comment_with_other_words_uses_the_last_request_word(text, word):
    assert slurm_channel.find(text) == word


def test_slurm_user_with_another_uid_on_the_node_is_refused():
    """A uid of another user on this node would start a guest of that user."""
    with pytest.raises(VtorqueError, match="mallory with uid 0, but on this node the uid is root"):
        slurm_channel.trusted_owner("mallory", 0)
    (guard,) = guards(slurm_channel, ("trusted_owner",))
    with without(guard):
        assert slurm_channel.trusted_owner("mallory", 0) == "root"
