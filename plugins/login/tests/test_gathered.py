"""Kept records of a running job, fetched from its nodes."""

import base64
import json
import os
import zlib
from pathlib import Path

import pytest

from login_homes import python
from vtorque_core.api import HostFault, JobAttempt, Paths, kept_records
from vtorque_login import gathered, plugin, state

CONFIG = Path("/etc/acme.toml")


def kept_on(node, top, **facts):
    """Return a node's records of job 7.srv."""
    place = kept_records.place(Paths(top / node), JobAttempt("7.srv", 0, "ada", os.getuid(), node))
    (top / node).mkdir()
    place.add_facts(job="7.srv", node=node, nodes=["n1", "n2"], **facts)
    place.write(kept_records.LOG, b'{"t": 1.0}\n' * 3)
    place.write("console-g0.log", b"not of a running job's log")
    return place


def packed(content):
    return base64.b64encode(zlib.compress(content)).decode()


@pytest.fixture
def nodes(monkeypatch):
    """Return a dictionary: node to the Python code of its answer."""
    code = {}
    monkeypatch.setattr(
        state.service, "vmgr", lambda _config, _command, _, node, *rest: python(code[node, *rest])
    )
    return code


def printing(said):
    return f"print({json.dumps(said)!r})"


def test_files_of_each_node_are_fetched_and_failing_nodes_named(nodes, tmp_path, capsys):
    """The bare-metal node of a mixed request contributes no lines."""
    asked = ("--files", "--", "7.srv")
    for node in ("n1", "n3"):
        place = kept_on(node, tmp_path, guests=[node])
        said = {"key": place.key, "files": gathered.pack_files(place)}
        nodes[node, *asked] = printing(said)
    nodes["n2", *asked] = nodes["metal", *asked] = "raise SystemExit('no \\x1b[2J way')"
    gathered.fetch_records([("7.srv", n) for n in ("n1", "n2", "n3", "metal")], CONFIG, 20.0)
    found = [each for part in [plugin.vtorque_kept_records()] for each in part]
    assert [each.facts()["guests"] for each in found] == [["n1"], ["n3"]]
    assert [each.read(kept_records.LOG) for each in found] == [b'{"t": 1.0}\n' * 3] * 2
    with pytest.raises(FileNotFoundError):
        found[0].open("console-g0.log")
    with os.fdopen(found[0].open(kept_records.LOG)) as log:
        assert log.read() == '{"t": 1.0}\n' * 3
    assert capsys.readouterr().err == "vmgr: incomplete, without n2: no \\x1b[2J way\n"


@pytest.mark.parametrize(
    "said",
    [
        [],
        {"key": "../../7.srv.0", "files": {}},
        {"key": "7.srv", "files": {}},
        {"key": "7.srv.0", "files": [1]},
        {"key": "7.srv.0", "files": {"../job.json": packed(b"{}")}},
        {"key": "7.srv.0", "files": {"job.json": base64.b64encode(b"none").decode()}},
        lambda: {"key": "7.srv.0", "files": {"job.json": packed(bytes(65 << 20))}},
    ],
)
def test_invalid_answer_of_a_node_is_ignored(nodes, said):
    said = said() if callable(said) else said
    nodes["n1", "--files", "--", "7.srv"] = printing(said)
    gathered.fetch_records([("7.srv", "n1")], CONFIG, 20.0)
    assert list(gathered.places()) == []


@pytest.mark.parametrize("forged", [5, None, {"n2": 1}, [5, None, ["n2"]]])
def test_forged_node_list_does_not_stop_the_command(nodes, capsys, forged):
    content = json.dumps({"nodes": forged}).encode()
    nodes["n1", "--files", "--", "7.srv"] = printing(
        {"key": "7.srv.0", "files": {"job.json": packed(content)}}
    )
    nodes["n2", "--files", "--", "7.srv"] = "raise SystemExit('no way')"
    gathered.fetch_records([("7.srv", "n1"), ("7.srv", "n2")], CONFIG, 20.0)
    assert [each.key for each in gathered.places()] == ["7.srv.0"]
    assert capsys.readouterr().err == "vmgr: incomplete, without n2: no way\n"


def test_total_size_of_all_answers_is_limited(nodes, monkeypatch):
    monkeypatch.setattr(gathered, "_MOST", 1000)
    said = {"key": "7.srv.0", "files": {"log.jsonl": packed(bytes(600))}}
    for node in ("n1", "n2"):
        nodes[node, "--files", "--", "7.srv"] = printing(said)
    gathered.fetch_records([("7.srv", "n1"), ("7.srv", "n2")], CONFIG, 20.0)
    assert [len(each.read("log.jsonl")) for each in gathered.places()] == [600]


def test_samples_are_left_out_first_above_the_limit(tmp_path, monkeypatch):
    place = kept_on("n1", tmp_path)
    place.write("series.jsonl", os.urandom(4000))
    assert list(gathered.pack_files(place)) == ["job.json", "log.jsonl", "series.jsonl"]
    monkeypatch.setattr(gathered, "_MOST_SENT", 3000)
    assert list(gathered.pack_files(place)) == ["job.json", "log.jsonl"]


@pytest.mark.parametrize(
    ("command", "options", "all_nodes"),
    [
        ("report", ["html"], True),
        ("logs", ["level", "as_json"], True),
        ("logs", ["follow"], False),
        ("logs", ["console"], False),
        ("ssh", [], False),
    ],
)
def test_commands_that_read_records_read_all_nodes(command, options, all_nodes):
    assert gathered.reads_all_nodes(command, options) == all_nodes


def test_node_with_endless_output_is_killed(nodes):
    nodes["n1", "--", "7.srv"] = "import os\nwhile True: os.write(1, b' ' * 65536)"
    with pytest.raises(HostFault, match="the job's state is larger than 2097152 bytes"):
        state.answer(str, "7.srv", "n1", CONFIG, 20.0, most=2 << 20)
