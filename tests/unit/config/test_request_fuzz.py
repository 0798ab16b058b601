"""Any bytes in place of a request are read completely, or refused in one line.

Valid requests are changed at random places: a short run of a long test with a coverage-guided
fuzzer (bench/results/laboratory.md, "Fuzzing").
"""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vtorque_core.api import submission
from vtorque_core.api.submission import to_token, unpack_token
from vtorque_core.base.errors import Refused
from vtorque_core.config import request
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import decide
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml
from vtorque_pbs import convention as pbs
from vtorque_pbs import job_records
from vtorque_pbs import request_channel as pbs_channel
from vtorque_slurm import hostlist
from vtorque_slurm import request_channel as slurm_channel

PLUGINS = Plugins.load(node=False)
SITE = build(parse_toml(b'[options.ram]\nmax = "4G"\n', Path("/etc/x.toml")), PLUGINS)
DOCUMENT = {
    "v": 1,
    "vm": [["ram", "1G"], ["vcpus", "2"], ["img", "micro"]],
    "files": {"vm_prologue": {"name": "a.sh", "data": "IyEvYmluL3NoCg=="}},
    "shell": "/bin/bash",
}
nasty = st.sampled_from(
    [None, True, -0.0, 1e308, 2**63, -1, "", "\0", "\ud800", "\u202e", "x" * 5000, [], {}, [[]]]
)
anything = st.recursive(
    nasty | st.text(max_size=9) | st.integers(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=4), below),
    max_leaves=6,
)


def bent(value, draw):
    """Return the value with one of its parts, at any depth, replaced."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        changed = dict(value)
        part = bent(changed.pop(key), draw)
        return changed | {draw(st.sampled_from([key, key, key, "extra", "v"])): part}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        place = draw(st.integers(0, len(value) - 1))
        copies = draw(st.sampled_from([0, 1, 1, 1, 2, 300]))
        return [*value[:place], *[bent(value[place], draw)] * copies, *value[place + 1 :]]
    return draw(anything)


@st.composite
def documents(draw):
    return json.dumps(bent(DOCUMENT, draw)).encode()


@st.composite
def damaged(draw, whole):
    """Return bytes with some removed, inserted or repeated."""
    data = draw(whole)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 9)))
        new = draw(st.binary(max_size=3) | st.just(data[start:end] * 2))
        data = data[:start] + new + data[end:]
    return data


def whole(word):
    return b"".join(unpack_token(word))


def read_or_refused(read, *args):
    """Return the parsed request, None if it was refused; every other error is a finding."""
    try:
        return read(*args)
    except Refused as error:
        line = str(error)
        assert line.isprintable() and len(line) < 20_000
        return None


def followed(blob):
    """Follow a request to the job that root would start."""
    found = read_or_refused(Request.decode, blob)
    if found is not None:
        assert Request.decode(found.encode()) == found
        read_or_refused(decide, found, SITE, PLUGINS)


WHOLE = st.just(json.dumps(DOCUMENT).encode())


@settings(deadline=None, max_examples=settings().max_examples)
@given(documents() | damaged(WHOLE) | damaged(documents()))
def test_mutated_request_is_decoded_or_refused(blob):
    followed(blob)


@settings(deadline=None, max_examples=settings().max_examples)
@given(damaged(WHOLE.map(zlib.compress)))
def test_mutated_token_is_decoded_or_refused(data):
    word = "vt1:" + base64.urlsafe_b64encode(b"\1" + data).decode().rstrip("=")
    blob = read_or_refused(whole, word)
    if blob is not None:
        assert len(blob) <= submission.MAX_REQUEST
        followed(blob)


tokens = WHOLE.map(to_token) | damaged(WHOLE.map(lambda b: to_token(b).encode())).map(
    lambda data: data.decode("utf-8", "surrogateescape")
)
around = st.text(st.sampled_from("abc ,+;=:\n\tvt1other#VTORQUE-REQUEST"), max_size=30)
places = st.tuples(around, tokens, around).map("".join) | st.text(max_size=60)


@settings(deadline=None, max_examples=settings().max_examples)
@given(places)
@example("x vt1: vt1:AHt9 ")
def test_mutated_slurm_comment_or_script_is_decoded_or_refused(text):
    raw = text.encode("utf-8", "surrogateescape" if not text.isprintable() else "replace")
    for word in (slurm_channel.find(text), slurm_channel.find_in_script(b"#!/bin/sh\n" + raw)):
        if word is not None:
            blob = read_or_refused(whole, word)
            if blob is not None:
                followed(blob)
    assert raw.endswith(slurm_channel.strip(raw))


@settings(deadline=None, max_examples=settings().max_examples)
@given(places, places)
def test_mutated_torque_resource_list_is_decoded_or_refused(resources, variables):
    asked = pbs.parse_resources(f"nodes=1,other={resources}")
    word = pbs_channel.torque_word(asked)
    for each in (word, *map(pbs_channel.hash_word, filter(str.isascii, variables.split(",")))):
        if each is not None:
            blob = read_or_refused(pbs_channel.torque_blob, each, variables)
            if blob is not None:
                followed(blob)
    pbs.ppn(resources)
    for jobs in (job_records.torque_jobs(resources), job_records.openpbs_jobs(resources)):
        assert isinstance(jobs, list)


@settings(deadline=None, max_examples=settings().max_examples)
@given(st.text(st.sampled_from("n0123456789[]-,x"), max_size=24))
@example("n[1-999999999]")
@example("n[" * 12)
def test_mutated_host_list_is_bounded(text):
    for read in (hostlist.expand, hostlist.counts):
        with contextlib.suppress(ValueError):
            assert len(read(text)) <= 100_000


def test_comparison_detects_a_difference(monkeypatch):
    """A parser that crashed on one of these would be a finding."""
    monkeypatch.setattr(request, "_object", lambda value, _what, _fields: value)
    with pytest.raises(KeyError):
        followed(b"{}")
