"""The manifest, the settings, and the resource in one process."""

import json
import socket
import time
from pathlib import Path

import pytest

import snapteld_double
from vtorque_core.api import HostFault
from vtorque_snap import node
from vtorque_snap.access import Access
from vtorque_snap.node import Settings
from vtorque_snap.task import SnapTask, fill, manifest, read_notes
from vtorque_testing.harness import PluginSite

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[1] / "vtorque_snap" / "example-task.json"
VALUES = {"jobid": "12[3].srv", "username": "an$a", "node": "n1"}


def made(template, guests=("vt-1", "vt-2")):
    return json.loads(manifest(json.dumps(template).encode(), "a name", VALUES, guests))


def template(**collect):
    return {"version": 1, "workflow": {"collect": {"metrics": {"/intel/a": {}}, **collect}}}


def test_shipped_example_is_filled_for_each_guest_and_tagged():
    body = manifest(EXAMPLE.read_bytes(), "snapTask-ana-7", VALUES, ["vt-7-0", "vt-7-1"])
    task = json.loads(body)
    assert (task["name"], task["start"], task["version"]) == ("snapTask-ana-7", False, 1)
    assert set(task) <= snapteld_double.KEYS
    collect = task["workflow"]["collect"]
    for guest in ("vt-7-0", "vt-7-1"):
        assert f"/intel/libvirt/{guest}/cpu/cputime" in collect["metrics"]
    assert "[guest]" not in body.decode()
    assert collect["tags"] == {"/intel": VALUES}
    assert collect["publish"][0]["plugin_name"] == "influxdb"


def test_known_placeholders_are_replaced_once():
    values = {"jobid": "[node]", "node": "n1"}
    assert fill("[jobid] [node] [x] [1] [", values) == "[node] n1 [x] [1] ["
    config = {"file": "/var/log/[jobid].[username]", "on": [True, 1, None, "[node]"]}
    task = made(template(publish=[{"plugin_name": "file", "config": config}]))
    got = task["workflow"]["collect"]["publish"][0]["config"]
    assert got == {"file": "/var/log/12[3].srv.an$a", "on": [True, 1, None, "n1"]}


def test_tags_of_the_site_are_kept():
    task = made(template(tags={"/intel": {"site": "[node]", "jobid": "no"}, "/x": {"a": "b"}}))
    assert task["workflow"]["collect"]["tags"] == {
        "/intel": {"site": "n1", **VALUES},
        "/x": {"a": "b"},
    }


def test_namespace_with_another_separator_is_tagged():
    task = made({"workflow": {"collect": {"metrics": {"|intel|a/b": {}, "/x": {}}}}})
    assert set(task["workflow"]["collect"]["tags"]) == {"|intel", "/x"}


def test_dollar_signs_are_not_expanded_by_snapteld(monkeypatch):
    """snapteld replaces $NAME in all its input before it parses the JSON."""
    monkeypatch.setenv("a", "SECRET")
    with snapteld_double.serving() as server:
        whole = template(config={"x": {"password": "$a${a}$$"}})
        whole["schedule"] = {"type": "simple", "interval": "1s"}
        body = manifest(json.dumps(whole).encode(), "n-$a", VALUES, [])
        task_of(server, body=body).create()
        (got,) = server.scheduler.seen.manifests
    assert got["name"] == "n-$a"
    assert got["workflow"]["collect"]["config"]["x"]["password"] == "$a${a}$$"
    assert got["workflow"]["collect"]["tags"]["/intel"]["username"] == "an$a"


COLLECT = '{"workflow": {"collect": %s}}'
NO_TEMPLATES = ["", "[]", "{", '"x"', "[" * 100000, '{"workflow": []}', COLLECT % "null"]
NO_TEMPLATES += [COLLECT % f'{{"metrics": {each}}}' for each in ("[]", "{}", '{"": {}}', '"a"')]
NO_TEMPLATES += [
    COLLECT % f'{{"metrics": {{"/a": {{}}}}, "tags": {t}}}' for t in ("[]", '{"/a": 1}')
]


@pytest.mark.parametrize("text", NO_TEMPLATES, ids=lambda text: text[:60])
def test_invalid_template_is_a_host_fault(text):
    with pytest.raises(HostFault, match=r"^template: "):
        manifest(text.encode(), "name", VALUES, ["g"])


def test_template_that_is_not_utf8_is_a_host_fault():
    with pytest.raises(HostFault, match=r"^template: "):
        manifest(b'"\xff"', "name", VALUES, ["g"])


# -- Settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"url": "ftp://localhost"}, "write http://"),
        ({"url": "http://"}, "write http://"),
        ({"url": "http://localhost:8181/v2"}, "write http://"),
        ({"url": "http://me:pw@localhost"}, "write http://"),
        ({"url": "http://localhost:99999"}, "ort"),
        ({"url": "https://localhost"}, "https requires ca"),
        ({"url": "http://far:1", "password": "/x", "name": "[jobid][node]"}, "plain text"),
        ({"url": "http://far:1"}, r"name must contain \[jobid\], and also \[node\]"),
        ({"name": "snap"}, r"name must contain \[jobid\], and also \[node\]"),
        ({"timeout": 0.0}, "0.5 to 20 s"),
        ({"timeout": 31.0}, "0.5 to 20 s"),
        ({"user": "a:b"}, "colon"),
        ({"nodes": "("}, "regular expression"),
    ],
)
def test_contradicting_settings_are_refused(values, says):
    with pytest.raises(ValueError, match=says):
        Settings(**values)


def test_valid_settings_are_accepted():
    Settings()
    Settings(url="https://[::1]:8181/", ca="/x", password="/y")
    Settings(url="http://far:1", name="[node]-[jobid]")


# -- The resource ----------------------------------------------------------------------------------


def task_of(server, name="t-1", notes="/nonexistent", body=None, host="localhost", version="v2"):
    body = body or manifest(EXAMPLE.read_bytes(), name, VALUES, ["g"])
    access = Access(f"http://{host}:{server.server_port}", version)
    return SnapTask(name, access, 10.0, str(notes), body)


def example(top):
    """Return a copy that only the owner can write; a checkout may be writable by its group."""
    path = top / "task.json"
    path.write_bytes(EXAMPLE.read_bytes())
    path.chmod(0o600)
    return str(path)


def names(server):
    return sorted(task["name"] for task in server.scheduler.table.values())


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("documented", [False, True])
def test_task_is_created_and_released_twice_and_without_create(version, documented, tmp_path):
    with snapteld_double.serving(documented=documented, stopping=0.1) as server:
        task, other = (task_of(server, n, tmp_path / "no", version=version) for n in ("a", "b"))
        task.release()
        task.create()
        other.create()
        assert [t["task_state"] for t in server.scheduler.table.values()] == ["Running"] * 2
        task.release()
        assert names(server) == ["b"]
        task.release()
        assert names(server) == ["b"]
        other.release()
        assert names(server) == []
        assert server.scheduler.seen.twice == []
    assert not (tmp_path / "no").exists()


def test_task_stopped_disabled_or_deleted_by_hand_is_released(tmp_path):
    with snapteld_double.serving() as server:
        for state in ("Stopped", "Disabled", "Ended", None):
            task = task_of(server, notes=tmp_path / "no")
            task.create()
            for key, entry in list(server.scheduler.table.items()):
                entry["task_state"] = state
                if state is None:
                    del server.scheduler.table[key]
            task.release()
            assert names(server) == []
    assert not (tmp_path / "no").exists()


def test_create_makes_no_second_task_of_one_name():
    with snapteld_double.serving() as server:
        task_of(server).create()
        task_of(server).create()
        assert names(server) == ["t-1"]
        assert server.scheduler.seen.twice == []


def test_task_created_during_its_release_is_removed(monkeypatch):
    """A start was killed, and snapteld creates its task after the release has first checked."""
    with snapteld_double.serving() as server:
        task = task_of(server)
        real = time.sleep

        def late(seconds):
            real(seconds)
            server.scheduler.create(task.body.decode())

        monkeypatch.setattr("vtorque_snap.task.time.sleep", late)
        task.release()
        assert names(server) == []


def test_task_of_an_unreachable_snapteld_is_removed_by_a_later_release(tmp_path, capsys):
    notes = tmp_path / "snap"
    with snapteld_double.serving(password="x") as server:
        server.scheduler.options.password = ""
        one, two = task_of(server, "one", notes), task_of(server, "two", notes)
        one.create()
        server.scheduler.options.password = "x"
        one.release()
        assert (
            capsys.readouterr().err.count("task one stays in snapteld until the next job ends:")
            == 1
        )
        one.release()  # recorded once
        assert [name for _, name in read_notes(str(notes), one.access.url)] == ["one"]
        assert oct(notes.stat().st_mode & 0o777) == "0o700"
        site = PluginSite(settings=(Settings(url=one.access.url, template=example(tmp_path)),))
        object.__setattr__(site.paths, "state", tmp_path)
        server.scheduler.options.password = ""
        _, left = node.check(site)
        assert (left.status, "snapteld yet: one" in left.message) == ("warning", True)
        task_of(server, "far", notes, host="127.0.0.1").release()
        assert names(server) == ["one"]  # recorded for another snapteld
        (notes / "half-written").write_text("")
        two.create()
        two.release()
        assert names(server) == []
        assert list(read_notes(str(notes), one.access.url)) == []
        assert len(list(node.check(site))) == 1


def test_ended_local_snapteld_has_no_tasks(tmp_path):
    with snapteld_double.serving() as server:
        here = task_of(server, notes=tmp_path / "snap")
        far = task_of(server, notes=tmp_path / "snap", host="127.0.0.2")
        here.create()
        port = server.server_port
    with socket.socket() as taken:  # no process may listen there
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", port))
        here.release()
        assert not (tmp_path / "snap").exists()
        far.release()
    assert [name for _, name in read_notes(str(tmp_path / "snap"), far.access.url)] == ["t-1"]


def test_doctor_reports_the_state_of_snapteld(tmp_path):
    with snapteld_double.serving() as server:
        settings = {"url": f"http://localhost:{server.server_port}", "template": example(tmp_path)}

        def asked(**changes):
            return next(iter(node.check(PluginSite(settings=(Settings(**settings, **changes),)))))

        assert asked().status == "ok"
        settings["template"] = str(tmp_path / "none")
        assert "none: No such file" in asked().message
        settings["template"] = example(tmp_path)
    (idle,) = node.check(PluginSite(settings=(Settings(),)))
    assert (idle.status, idle.message[:14]) == ("ok", "not configured")
    assert asked().status == "warning"
    assert asked(required=True).status == "failed"
