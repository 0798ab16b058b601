"""Arrival of a migrated guest: requests, failures, and the side that releases."""

import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import running_journal
from vtorque_core import __version__
from vtorque_core.api.batch_system import BatchJob, Outcome
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.config.plugins import Plugins
from vtorque_core.node.start import cleanup, prologue, receive
from vtorque_core.records.reading import ARRIVES
from vtorque_survive import domains
from vtorque_survive import node as survive
from vtorque_survive import receive as survive_receive
from vtorque_survive.receive import JobDescription

GUEST = {
    "name": "vt-42.0-n2-0", "uuid": "0b1ad9ba", "hostname": "vn2", "job_id": "42", "attempt": 0,
    "leased": [["address", "10.0.0.9"]], "state_dir": "/s/g0", "run_dir": "/r/g0",
    "xml": "<domain/>",
}  # fmt: skip
TOLD = {
    "job": "42", "nodes": ["n1", "n3"], "leaves": "n2", "to": "n3", "guests": [GUEST],
    "versions": {"vTorque": __version__, "QEMU": "10"},
}  # fmt: skip


NOT = threading.Event()


class ReceivingBatch:
    """A double of a batch system that reserves this node."""

    def __init__(self):
        self.held, self.finished = [], []

    def reserve_node(self, job_id, nodes, left, node):
        self.held.append(node)
        return BatchJob(job_id, "ada", node, nodes, b"")

    def release_node(self, _job_id, node):
        self.held.remove(node)

    def is_reserved(self, *_):
        raise AssertionError

    def remove_node(self, *_):
        raise AssertionError

    def has_ended(self, *_):
        raise AssertionError

    def finish(self, _job, outcome, reason, *, hook_waits):
        self.finished.append((outcome, reason))
        return 0


@pytest.fixture
def receiving_node(tmp_path, monkeypatch):
    """Return this node, and a function that receives; ``starts`` stands for the start of guests."""
    paths = running_journal.paths_below(tmp_path)
    node = SimpleNamespace(libvirt_uri="test:///default", start_timeout=30.0)
    log = SimpleNamespace(level="INFO")
    site = SimpleNamespace(
        paths=paths, node=node, log=log, batch=SimpleNamespace(system="acme"), path=tmp_path
    )
    made = SimpleNamespace(
        paths=paths, site=site, adapter=ReceivingBatch(), released=[], starts=lambda _: None
    )
    made.plugins = Plugins()
    hook = SimpleNamespace(vtorque_receive=survive.vtorque_receive)
    made.plugins.register("survive", hook, "vtorque-survive 1.0")
    monkeypatch.setattr(receive.virtiofs_daemon, "can_save", lambda: True)
    monkeypatch.setattr(hypervisor, "versions", lambda _: {"vTorque": __version__, "QEMU": "10"})
    monkeypatch.setattr(
        receive, "release_attempts", lambda job_id, *_: made.released.append(job_id)
    )
    user = SimpleNamespace(name="ada", uid=os.geteuid())
    monkeypatch.setattr(receive.job_context, "job_user", lambda *_: user)
    start = lambda *_, arriving: made.starts(*arriving)  # noqa: E731
    monkeypatch.setattr(receive, "start_job", start)
    # A separate process would also have the sender's end of the pipe until it has closed it.
    monkeypatch.setattr(receive, "helper_process", contextlib.nullcontext)

    def run(told=TOLD):
        requests, asks = os.pipe()
        answers, says = os.pipe()
        os.write(asks, told if isinstance(told, bytes) else json.dumps(told).encode() + b"\n")
        made.sender = os.fdopen(asks, "wb")
        code = receive.run(made.adapter, made.site, made.plugins, requests, says)
        made.sender.close()
        os.close(requests)
        os.close(says)
        with os.fdopen(answers, "rb") as file:
            return code, [json.loads(line) for line in file]

    made.run = run
    return made


def test_request_of_the_source_node_is_parsed(receiving_node):
    told = JobDescription.read(json.dumps(TOLD).encode())
    assert (told.job, told.nodes, told.to) == ("42", ("n1", "n3"), "n3")
    assert told.guests[0].leased == (("address", "10.0.0.9"),) and told.guests[0].xml == "<domain/>"


@pytest.mark.parametrize(
    "told", [b"\n", b"[]\n", b"{}\n", json.dumps(TOLD | {"to": "n9"}).encode() + b"\n",
             json.dumps(TOLD | {"guests": [{**GUEST, "leased": "ab"}]}).encode() + b"\n",
             json.dumps(TOLD | {"guests": []}).encode() + b"\n",
             json.dumps(TOLD | {"job": None}).encode() + b"\n"]
)  # fmt: skip
def test_invalid_request_is_refused(receiving_node, told):
    code, (said,) = receiving_node.run(told)
    assert code and "invalid request" in said["failed"]


def test_guest_is_received_with_local_xml_and_resumed(receiving_node, monkeypatch):
    states = iter(["", "still", "runs"])
    monkeypatch.setattr(domains, "domain_state", lambda *_: next(states))
    receiving_node.starts = lambda guest: guest.arrive(guest.guest.uuid, "<domain of='here'/>", NOT)
    assert receiving_node.run() == (
        0,
        [{"xml": {"0b1ad9ba": "<domain of='here'/>"}}, {"here": True}],
    )
    assert receiving_node.adapter.held == ["n3"] and receiving_node.released == []


def test_filters_of_nics_are_complete_before_the_guest_arrives(receiving_node, monkeypatch):
    """``still``: libvirt has created the domain, at first without tap devices."""
    states, did = iter(["", "still", "still", "runs"]), []
    monkeypatch.setattr(domains, "domain_state", lambda *_: did.append(next(states)) or did[-1])

    def filter_nics():
        did.append("filter")
        if did.count("filter") == 1:
            raise HostFault("nft: no such device")

    uuid = GUEST["uuid"]
    receiving_node.starts = lambda guest: guest.arrive(uuid, "<domain/>", NOT, filter_nics)
    assert receiving_node.run()[0] == 0
    assert did == ["", "still", "filter", "still", "filter", "runs"]


def test_guests_of_a_job_are_sent_only_when_all_are_ready(receiving_node, monkeypatch):
    monkeypatch.setattr(domains, "domain_state", lambda *_: "runs")
    both = TOLD | {"guests": [GUEST, GUEST | {"uuid": "1b1ad9ba"}]}

    def starts(*guests):
        with ThreadPoolExecutor(2) as threads:
            uuids = [(each, each.guest.uuid) for each in guests]
            work = [threads.submit(each.arrive, uuid, uuid, NOT) for each, uuid in uuids]
        for done in work:
            done.result()

    receiving_node.starts = starts
    xml = {"0b1ad9ba": "0b1ad9ba", "1b1ad9ba": "1b1ad9ba"}
    assert receiving_node.run(both) == (0, [{"xml": xml}, {"here": True}])
    receiving_node.site.node.start_timeout = 0.0
    receiving_node.starts = lambda guest, _: guest.arrive(guest.guest.uuid, "<domain/>", NOT)
    receiving_node.adapter.held.clear()
    assert receiving_node.run(both) == (
        1,
        [{"failed": "another guest of the job was not prepared in time"}],
    )
    receiving_node.site.node.start_timeout = 3600.0
    failed = threading.Event()
    failed.set()
    receiving_node.starts = lambda guest, _: guest.arrive(guest.guest.uuid, "<domain/>", failed)
    receiving_node.released.clear()
    assert receiving_node.run(both) == (
        1,
        [{"failed": "another guest of the job was not prepared in time"}],
    )
    assert receiving_node.adapter.held == [] and receiving_node.released == ["42"]


def test_start_that_fails_before_arrival_is_released(receiving_node):
    def fails(_guest):
        raise HostFault("no room")

    receiving_node.starts = fails
    assert receiving_node.run() == (1, [{"failed": "no room"}])
    assert receiving_node.adapter.held == [] and receiving_node.released == ["42"]


def test_start_that_fails_after_arrival_releases_nothing(receiving_node, monkeypatch):
    """The guest may already run here."""
    monkeypatch.setattr(domains, "domain_state", lambda *_: "runs")

    def fails(guest):
        guest.arrive(guest.guest.uuid, "<domain/>", NOT)
        raise HostFault("silent")

    receiving_node.starts = fails
    assert receiving_node.run() == (1, [{"xml": {"0b1ad9ba": "<domain/>"}}, {"failed": "silent"}])
    assert receiving_node.adapter.held == ["n3"] and receiving_node.released == []


def test_disconnected_source_after_arrival_leaves_all_resources(receiving_node, monkeypatch):
    def leaves(*_):
        receiving_node.sender.close()
        return "still"

    monkeypatch.setattr(domains, "domain_state", leaves)
    receiving_node.starts = lambda guest: guest.arrive(guest.guest.uuid, "<domain/>", NOT)
    assert receiving_node.run() == (1, [{"xml": {"0b1ad9ba": "<domain/>"}}])
    assert receiving_node.adapter.held == ["n3"] and receiving_node.released == []


def test_unresponsive_source_is_not_awaited_forever(receiving_node, monkeypatch):
    """The source's line never ends; the destination then frees the job's lock and answers."""
    monkeypatch.setattr(domains, "domain_state", lambda *_: "")
    monkeypatch.setattr(survive_receive, "_ARRIVES", 0.0)
    receiving_node.starts = lambda guest: guest.arrive(guest.guest.uuid, "<domain/>", NOT)
    assert receiving_node.run() == (1, [{"xml": {"0b1ad9ba": "<domain/>"}}])
    assert receiving_node.adapter.held == ["n3"] and receiving_node.released == []


def test_disconnected_source_before_arrival_is_released(receiving_node):
    """The source may have been told that nothing is here: it does not ask again."""

    def starts(guest):
        receiving_node.sender.close()
        guest.arrive(guest.guest.uuid, "<domain/>", NOT)

    receiving_node.starts = starts
    assert receiving_node.run() == (1, [])
    assert receiving_node.adapter.held == [] and receiving_node.released == ["42"]


def test_other_version_is_refused_before_anything_is_held(receiving_node, monkeypatch):
    monkeypatch.setattr(hypervisor, "versions", lambda _: {"vTorque": __version__, "QEMU": "11"})
    assert receiving_node.run()[1] == [{"failed": "n3 has QEMU 11, but the source node has 10"}]
    monkeypatch.setattr(receive.virtiofs_daemon, "can_save", lambda: False)
    assert "cannot save its state" in receiving_node.run()[1][0]["failed"]
    assert receiving_node.adapter.held == []


def test_batch_system_that_cannot_hold_a_node_is_refused(receiving_node):
    receiving_node.adapter = SimpleNamespace()
    assert "acme cannot reserve a node" in receiving_node.run()[1][0]["failed"]


@pytest.mark.parametrize("number", [0, 2])
def test_receiving_fails_unless_exactly_one_plugin_receives(receiving_node, number, capsys):
    receiving_node.plugins = Plugins()
    for each in range(number):
        hook = SimpleNamespace(vtorque_receive=survive.vtorque_receive, number=each)
        receiving_node.plugins.register(f"acme{each}", hook, "vtorque-acme 1.0")
    assert receiving_node.run() == (1, [])
    assert f"{number} of this node's plugins receive migrating guests" in capsys.readouterr().err


def test_second_arrival_of_the_same_job_is_refused(receiving_node):
    running_journal.JournalledJob(receiving_node.paths, "42")
    assert receiving_node.run()[1] == [{"failed": "job 42 already holds resources on n3"}]
    assert receiving_node.released == []


@pytest.mark.parametrize("attempt", [0, 1])
def test_prologue_of_the_same_attempt_keeps_an_arriving_guest(receiving_node, attempt, monkeypatch):
    """A prologue of a later attempt releases the resources of the earlier attempt."""
    running_journal.JournalledJob(receiving_node.paths, "42").journal.phase(ARRIVES)
    released = []
    monkeypatch.setattr(cleanup, "release_job", lambda *_: released.append(1) or [])
    monkeypatch.setattr(prologue, "start_job", lambda *_: None)
    monkeypatch.setattr(cleanup, "notify", lambda *_: [])
    job = BatchJob("42", "nobody-of-this-name", "n3", ("n3",), b"", attempt=attempt)
    assert (
        prologue._run(job, receiving_node.site, None, receiving_node.adapter, prologue.StartHook())
        == 0
    )
    ((outcome, _),) = receiving_node.adapter.finished
    assert released == [1] * attempt
    assert outcome is (Outcome.READY if attempt else Outcome.NOT_OURS)
