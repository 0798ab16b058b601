"""vsub and the node accept the same requests, and refuse the others with the same message.

Both run as in reality: vsub from its arguments to the submitted bytes, with the declaring halves of
all installed plugins; the node from untrusted bytes, with both halves. Only the batch system in
between is simulated.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vtorque_core.api.batch_system import SubmitArgs
from vtorque_core.api.strategies import BatchSystem
from vtorque_core.api.submission import to_token, unpack_token
from vtorque_core.api.values import hookimpl
from vtorque_core.base.errors import Refused
from vtorque_core.cli import vsub
from vtorque_core.config import policy
from vtorque_core.config.job_size import JobGrant
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml

CONFIG = """
[batch]
system = "played"
vm_by_default = true
[images]
pool = "/nonexistent"
[options.ram]
min = 128
max = "4G"
[options.vcpus]
max = 8
[options.img]
default = "micro"
allow = ["micro", "deb-*"]
[options.distro]
deny = ["old*"]
[options.disk]
allow = ["/data/*"]
[options.keep]
deny = [true]
[options.vm_epilogue]
deny = ["*"]
"""
SCRIPT = b"#!/bin/sh\nexit 0\n"


class Played:
    """A batch system that keeps vsub's submissions; its only option is ``-vm``."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self.given: tuple[int | None, int | None] = (None, None)  # CPUs and MiB by its options

    def split(self, argv):
        cpus, mib = self.given
        more = {"content": SCRIPT, "vcpus_given": cpus, "mib_given": mib}
        return SubmitArgs(tuple(argv[1::2]), ("job.sh",), **more)

    def submit(self, args, blob, needs):
        self.blobs.append(blob)
        self.needs = needs
        return 0

    @hookimpl
    def vtorque_batch_systems(self):
        yield BatchSystem("played", submitter=lambda _site: self, node=None, shell=None)


def half(node: bool):
    """Return one side's batch system, site and plugins."""
    plugins, played = Plugins.load(node=node), Played()
    assert not plugins.broken
    plugins.register("played", played, "tests")
    return (
        played,
        build(parse_toml(CONFIG.encode(), Path("/etc/x.toml")), plugins, node=node),
        plugins,
    )


FRONT, NODE = half(node=False), half(node=True)
OPTIONS = FRONT[2].options()
GIVEN = {
    "ram": ["1G", "64M", "8G", "512"], "vcpus": ["1", "8", "9"], "img": ["micro", "deb-12", "arch"],
    "distro": ["debian", "old-one"], "disk": ["/data/x", "/etc/shadow", "x"],
    "keep": ["true", "false", "1"],
}  # fmt: skip
keys = st.sampled_from(sorted(OPTIONS)) | st.sampled_from(["shares", "qemu_args"])
words = st.sampled_from(
    ["true", "on", "off", "0", "1", "4", "1-3", "all", "auto", "64M", "1G", "0000:00:01.0", "x:y"]
)
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=",\0"), max_size=12)


@st.composite
def pairs(draw):
    found = {}
    for key in draw(st.lists(keys, unique=True, max_size=4)):
        own = GIVEN.get(key) or [OPTIONS[key].show(OPTIONS[key].default)] if key in OPTIONS else []
        value = draw(st.sampled_from([*own, "on"]) | words | text).strip()
        found[key] = value or "x"
    return found


def on_the_front_end(wanted, where):
    """Return vsub's refusals, and its submission."""
    played, site, plugins = FRONT
    played.blobs.clear()
    argv = []
    (where / "file").write_bytes(SCRIPT)
    for key, value in wanted.items():
        is_file = key in OPTIONS and OPTIONS[key].names_file(value)
        argv += ["-vm", f"{key}={where / 'file' if is_file else value}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vsub, "load", lambda path, node: (site, plugins))
        try:
            assert vsub.submit(argv) == 0
        except Refused as error:
            return error.refusals, None
    (blob,) = played.blobs
    return (), blob


def forged(wanted):
    """Return the same request, written manually."""
    names_file = {k for k, v in wanted.items() if k in OPTIONS and OPTIONS[k].names_file(v)}
    vm = [[k, v] for k, v in wanted.items() if k not in names_file]
    data = {"name": "file", "data": base64.b64encode(SCRIPT).decode()}
    files = dict.fromkeys(names_file, data)
    return json.dumps({"v": 1, "vm": vm, "files": files, "shell": None}).encode()


def on_the_node(blob, node=NODE):
    """Return root's refusals, and the job that it would start."""
    _, site, plugins = node
    try:
        return (), policy.decide(
            Request.decode(b"".join(unpack_token(to_token(blob)))), site, plugins
        )
    except Refused as error:
        return error.refusals, None


@settings(deadline=None, max_examples=settings().max_examples * 3 // 2)
@given(pairs())
@example({})
@example({"ram": "8G", "img": "arch", "shares": "/"})
@example({"vm_prologue": "x"})
@example({"vm_epilogue": "x", "ram": "1G"})
def test_vsub_and_node_decide_alike(tmp_path_factory, wanted):
    refusals, blob = on_the_front_end(wanted, tmp_path_factory.getbasetemp())
    by_hand, job = on_the_node(forged(wanted))
    # An unknown key is reported before the values are checked, on the front end.
    unknown = set(wanted) - set(OPTIONS)
    assert (blob is None) == (job is None)
    if not unknown:
        assert [str(each) for each in refusals] == [str(each) for each in by_hand]
    if blob is not None:
        _, submitted = on_the_node(blob)
        assert submitted is not None
        assert (submitted.values, submitted.given) == (job.values, job.given)


@pytest.mark.parametrize(
    ("given", "asked", "size"),
    [
        ((None, None), (1, 1280), (1, 1024)),
        ((6, None), (6, None), (6, 4096)),  # the size of such a job, without limits here
        ((None, 2048), (1, 2048), (1, 1792)),
        ((6, 2048), (6, 2048), (6, 1792)),
        ((64, 65536), (8, 4352), (8, 4096)),  # at most the site's maximum
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_vsub_requests_missing_resources_and_the_node_computes_the_same_size(
    tmp_path, monkeypatch, given, asked, size, count
):
    """The node computes the same size from the batch system's allocation."""
    played, site, plugins = FRONT
    monkeypatch.setattr(played, "given", tuple(n and n * count for n in given))
    refusals, blob = on_the_front_end({"vms_per_node": str(count)}, tmp_path)
    assert refusals == ()
    needs = (played.needs.cpus, played.needs.mib)
    assert needs == tuple(n and n * count for n in asked)
    got = (g or n or 64 << 10 for g, n in zip(played.given, needs, strict=True))
    wanted = policy.check_options(Request.decode(blob), site, plugins)
    job, _ = policy.resolve(wanted, site, plugins, JobGrant(*got))
    assert (job.values["vcpus"], job.values["ram"]) == size


def test_allocation_smaller_than_the_guests_is_refused_by_vsub(tmp_path, monkeypatch):
    monkeypatch.setattr(FRONT[0], "given", (None, 100))
    (refusal,), _ = on_the_front_end({}, tmp_path)
    said = "the guests of a node need 384 MiB of memory, but the job requests 100"
    assert refusal.message == said


def test_vsub_and_node_have_the_same_options_and_limits():
    """The acting halves, loaded too, add no option, default or limit."""
    assert set(NODE[2].options()) == set(OPTIONS)
    assert NODE[1].options == FRONT[1].options


def test_stricter_policy_of_the_node_changes_its_decision():
    """The comparison can fail: the node's decision is its own."""
    _, _, plugins = NODE
    stricter = CONFIG.replace('max = "4G"', 'max = "1G"')
    site = build(parse_toml(stricter.encode(), Path("/etc/x.toml")), plugins, node=True)
    blob = forged({"ram": "2G"})
    assert on_the_node(blob)[1] is not None
    assert on_the_node(blob, (None, site, plugins))[1] is None


@pytest.mark.parametrize("side", ["vsub", "node"])
def test_side_without_the_check_accepts_the_request(side, monkeypatch, tmp_path):
    def lenient(request, site, plugins):
        pairs = [pair for pair in request.pairs if pair[0] != "ram"]
        return real(Request(tuple(pairs), request.files), site, plugins)

    real = policy.check_options
    monkeypatch.setattr(
        *((vsub, "check_options") if side == "vsub" else (policy, "check_options")), lenient
    )
    wanted = {"ram": "8G"}
    accepted = on_the_front_end(wanted, tmp_path)[1], on_the_node(forged(wanted))[1]
    assert [each is not None for each in accepted] == [side == "vsub", side == "node"]
