"""The client with a double of snapteld, and with misbehaving servers."""

import contextlib
import os
import resource
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

import snapteld_double
from vtorque_core.api import HostFault
from vtorque_snap.access import Access
from vtorque_snap.client import MAX_BYTES, NotRunning, SnapClient, run_with_client
from vtorque_snap.task import manifest

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[1] / "vtorque_snap" / "example-task.json"
BODY = manifest(EXAMPLE.read_bytes(), "a-task", {"jobid": "1"}, ["vt-1"])
PATIENCE = 20.0  # seconds: for servers that do not hang
SHORT = 0.5


def url_of(server, host="localhost"):
    return f"http://{host}:{server.server_port}"


def states(client):
    return [(task.name, task.state) for task in client.tasks()]


@pytest.fixture
def private_directory(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "password"
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return write


@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_task_is_created_started_and_removed(version, documented):
    with snapteld_double.serving(documented=documented, stopping=0.2) as server:

        def work(client):
            assert states(client) == []
            task = client.create(BODY)
            assert states(client) == [("a-task", "Stopped")]
            client.start(task)
            assert states(client) == [("a-task", "Running")]
            assert not client.remove({"another"})
            assert client.remove({"a-task", "another"})
            assert states(client) == []
            assert not client.remove({"a-task"})

        run_with_client(Access(url_of(server), version), PATIENCE, work)
        seen = server.scheduler.seen
    assert {each.split("/")[1] for each in seen.requests} == {version}
    assert sum(each.startswith("POST") for each in seen.requests) == 1


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_error_of_snapteld_is_reported(version):
    with snapteld_double.serving(broken=True) as server:
        access = Access(url_of(server), version)
        with pytest.raises(HostFault, match=r"POST /tasks: 500 'Unrecognized key 'x'|Task must in"):
            run_with_client(access, PATIENCE, lambda client: client.create(b"{}"))
        with pytest.raises(HostFault, match=r"PUT .*Task is disabled. Cannot be started"):
            run_with_client(access, PATIENCE, lambda client: client.start(client.create(BODY)))
        run_with_client(
            access, PATIENCE, lambda client: client.remove({"a-task"})
        )  # a disabled one
        assert server.scheduler.table == {}


def test_task_that_does_not_end_times_out_with_the_answer():
    with snapteld_double.serving(stopping=1000) as server:
        access = Access(url_of(server), "v1")
        run_with_client(access, PATIENCE, lambda client: client.start(client.create(BODY)))
        with pytest.raises(HostFault, match=r"no success within 0\.5 s.*Task must be stopped"):
            run_with_client(access, SHORT, lambda client: client.remove({"a-task"}))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_password_is_required_and_read_from_a_private_file(version, private_directory):
    with snapteld_double.serving(password="s3cret:x") as server:

        def ask(password=""):
            access = Access(url_of(server), version, "snap", password)
            return run_with_client(access, PATIENCE, SnapClient.tasks)

        with pytest.raises(HostFault, match=r"authentication failed \(without a password\): 401"):
            ask()
        with pytest.raises(HostFault, match=r"authentication failed \(user 'snap'\): 401") as error:
            ask(private_directory("wrong\n"))
        assert "wrong" not in str(error.value)
        assert ask(private_directory("s3cret:x\n")) == []
        before = len(server.scheduler.seen.requests)
        with pytest.raises(HostFault, match="is a secret, but users other than root can access it"):
            ask(private_directory("s3cret:x\n", 0o640))
        assert len(server.scheduler.seen.requests) == before


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    top = tmp_path_factory.mktemp("tls")
    for name in ("localhost", "elsewhere"):
        subject = f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"
        files = "-keyout", top / f"{name}.key", "-out", top / f"{name}.pem"
        kind = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"
        argv = ["openssl", "req", "-x509", *kind, "-days", "2", "-subj", *subject, *files]
        subprocess.run(argv, check=True, capture_output=True)
    return lambda name: (str(top / f"{name}.pem"), str(top / f"{name}.key"))


def test_tls_is_always_verified(certificate, monkeypatch):
    with snapteld_double.serving(tls=certificate("localhost")) as server:

        def ask(ca, host="localhost"):
            access = Access(f"https://{host}:{server.server_port}", "v2", ca=ca)
            return run_with_client(access, PATIENCE, SnapClient.tasks)

        right, other = certificate("localhost")[0], certificate("elsewhere")[0]
        assert ask(right) == []
        with pytest.raises(HostFault, match="CERTIFICATE_VERIFY_FAILED"):
            ask(other)
        monkeypatch.setenv("SSL_CERT_FILE", right)
        with pytest.raises(HostFault, match="CERTIFICATE_VERIFY_FAILED"):
            ask(other)
        with pytest.raises(HostFault, match=r"CERTIFICATE_VERIFY_FAILED.*127.0.0.1"):
            ask(right, "127.0.0.1")
    with (
        snapteld_double.serving(tls=certificate("elsewhere")) as server,
        pytest.raises(HostFault, match=r"CERTIFICATE_VERIFY_FAILED.*not valid for 'localhost'"),
    ):
        ask(certificate("elsewhere")[0])


def test_proxy_variables_are_ignored(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with snapteld_double.serving() as server:
        assert run_with_client(Access(url_of(server), "v2"), PATIENCE, SnapClient.tasks) == []


# -- No snapteld -----------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(talk):
    """Have ``talk(connection)`` answer each client; yield the URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def one(connection):
        with connection, contextlib.suppress(OSError):
            talk(connection)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=one, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def server_sending(data):
    def talk(connection):
        connection.recv(65536)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(65536)

    return talk


def reply(body, status="200 OK", more=b""):
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n".encode()
    return head + more + b"\r\n" + body


V2_TASK = b'{"tasks": [{"id": "%s", "name": "a", "task_state": "Running"}]}'
NONSENSE = {
    "not http": (b"SSH-2.0-OpenSSH_9.2\r\n", r"SSH-2.0"),
    "closed connection": (b"", "closed connection without response"),
    "html": (reply(b"<html>hello</html>"), "invalid JSON b'<html>"),
    "deeply nested": (reply(b"[" * 100000), "invalid JSON"),
    "long number": (reply(b"9" * 100000), "invalid JSON"),
    "not utf-8": (reply(b'{"tasks": "\xff"}'), "invalid JSON"),
    "empty body": (reply(b""), "the field tasks is not a list"),
    "list": (reply(b"[1, 2]"), "the field tasks is not a list"),
    "no tasks": (reply(b'{"tasks": null}'), "the field tasks is not a list"),
    "text as a task": (reply(b'{"tasks": ["a"]}'), "'a' is not a task"),
    "id is a number": (
        reply(b'{"tasks": [{"id": 1, "name": "a", "task_state": ""}]}'),
        "is not a task",
    ),
    "id is a path": (reply(V2_TASK % b"../plugins"), "is not a task"),
    "newline in the id": (reply(V2_TASK % b"a\\r\\nb"), "is not a task"),
    "truncated": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        "IncompleteRead|is not a list",
    ),
    "escape sequence in an error": (
        reply(b'{"message": "\\u001b[2Jno"}', "503 Busy"),
        r"503 '\\x1b\[2Jno'",
    ),
    "many headers": (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", "more than 100 headers"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_invalid_answer_is_reported_in_one_line(name):
    data, error = NONSENSE[name]
    with answering(server_sending(data)) as url, pytest.raises(HostFault, match=error) as found:
        run_with_client(Access(url, "v2"), PATIENCE, SnapClient.tasks)
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 500


def test_redirect_is_not_followed():
    with snapteld_double.serving(password="secret") as other:
        where = f"Location: {url_of(other)}/v2/tasks\r\n".encode()
        talk = server_sending(reply(b"", "307 Temporary Redirect", where))
        with answering(talk) as url, pytest.raises(HostFault, match="GET /tasks: 307"):
            run_with_client(Access(url, "v2"), PATIENCE, SnapClient.tasks)
        assert other.scheduler.seen.requests == []


def test_endless_answer_is_not_kept():
    def talk(connection):
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b" " * 65536)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = f"the answer is larger than {MAX_BYTES >> 20} MiB"
    with answering(talk) as url, pytest.raises(HostFault, match=error):
        run_with_client(Access(url, "v2"), PATIENCE, SnapClient.tasks)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_connection_refused_means_not_running():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(NotRunning, match="not running"):
            run_with_client(Access(url, "v2"), PATIENCE, SnapClient.tasks)


def silent(connection):
    while connection.recv(65536):
        pass


def drips(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def drips_a_body(connection):
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.02)


def continues(connection):
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.001)


def full(connection):
    """Read nothing, so that a request does not fit into the buffers."""
    time.sleep(PATIENCE)


@pytest.mark.parametrize("talk", [silent, drips, drips_a_body, continues, full])
def test_deadline_holds_with_any_server_behavior(talk):
    with answering(talk) as url:
        body = b"x" * (64 << 20) if talk is full else b"{}"
        with pytest.raises(HostFault, match=r"no success within 0.5 s"):
            run_with_client(Access(url, "v2"), SHORT, lambda client: client.create(body))
        end = time.monotonic() + PATIENCE
        while any(each.name == "snapteld" for each in threading.enumerate()):
            assert time.monotonic() < end, "the client's thread has not ended"
            time.sleep(0.02)


def test_connection_that_is_not_accepted_times_out():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.ExitStack() as stack:
            for _ in range(4):  # the queue is full
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            with pytest.raises(HostFault, match=r"no success within 0.5 s"):
                run_with_client(Access(url, "v2"), SHORT, SnapClient.tasks)


def test_slow_name_server_does_not_create_a_task_later(monkeypatch):
    asked = threading.Event()
    real = socket.getaddrinfo

    def slow(*arguments, **others):
        asked.wait(PATIENCE)
        return real(*arguments, **others)

    with snapteld_double.serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", slow)
            with pytest.raises(HostFault, match=r"no success within 0.5 s"):
                run_with_client(
                    Access(url_of(server), "v2"), SHORT, lambda client: client.create(BODY)
                )
            asked.set()
            end = time.monotonic() + PATIENCE
            while any(each.name == "snapteld" for each in threading.enumerate()):
                assert time.monotonic() < end
                time.sleep(0.02)
        assert server.scheduler.seen.requests == []


def test_ca_file_that_others_can_write_is_not_read(tmp_path):
    path = tmp_path / "ca.pem"
    path.write_text("")
    path.chmod(0o666)
    with pytest.raises(HostFault, match="can be written by others than root"):
        run_with_client(
            Access("https://localhost:1", "v2", ca=str(path)), PATIENCE, SnapClient.tasks
        )
    with pytest.raises(HostFault, match="No such file"):
        run_with_client(
            Access("https://localhost:1", "v2", ca=f"{path}{os.getpid()}"),
            PATIENCE,
            SnapClient.tasks,
        )
