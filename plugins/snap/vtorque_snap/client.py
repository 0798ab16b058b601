"""A client for the tasks of snapteld's REST API, v1 and v2, with a deadline.

Sources: Snap's docs/REST_API_V1.md, REST_API_V2.md and mgmt/rest. Version 1 wraps answers in
``{"meta": ..., "body": ...}``. Error codes are unreliable (v2 answers 500 for a missing task).
Therefore the client checks the task list to see the effect of a request.

Answers are untrusted: their size is limited, their structure is checked, and redirects are not
followed. Proxies and certificates from the environment are ignored.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from vtorque_core.api import ConfigError, HostFault, require_root_owned, require_secret
from vtorque_snap.access import Access, value_at

T = TypeVar("T")
MAX_BYTES = 4 << 20  # size limit of an answer: a list of about 10,000 tasks
_AGAIN = 0.05  # seconds between two polls of a task that is being stopped
_ID = re.compile(r"[0-9A-Za-z-]{1,64}", re.ASCII)  # a UUID; it becomes a part of a path


class NotRunning(HostFault):
    """Error if no process listens at snapteld's address."""


@dataclass(frozen=True)
class TaskEntry:
    """An entry of the task list. ``state``: Running, Stopped, Stopping, Disabled or Ended."""

    id: str
    name: str
    state: str


def run_with_client(access: Access, seconds: float, work: Callable[[SnapClient], T]) -> T:
    """Run ``work`` with a client, and fail after ``seconds``. Raises HostFault.

    ``work`` runs in a thread, which is abandoned if name resolution hangs.
    """
    client = SnapClient(access, seconds)
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work(client))
        except BaseException as error:
            done.set_exception(error)
        finally:
            client.close()

    thread = threading.Thread(target=run, name="snapteld", daemon=True)
    thread.start()
    try:
        return done.result(timeout=seconds)
    except TimeoutError:
        client.abort()
        raise client.deadline_error() from None
    finally:
        thread.join(timeout=0.1)


def read_trusted(path: str | Path, *, secret: bool = False) -> bytes:
    """Return the content of a file. Raises HostFault if users other than root may write the file.

    With ``secret``, other users may not read the file either.
    """
    try:
        (require_secret if secret else require_root_owned)(Path(path), uid=os.geteuid())
        with Path(path).open("rb") as file:
            return file.read(1 << 20)
    except ConfigError as error:
        raise HostFault(str(error)) from None
    except OSError as error:
        raise HostFault(f"{path}: {error.strerror}") from None


class SnapClient:
    """A connection to snapteld with a deadline, after which no request is sent."""

    def __init__(self, access: Access, seconds: float) -> None:
        self.access = access
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._headers = {"Content-Type": "application/json"}
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._refusal = ""

    def tasks(self) -> list[TaskEntry]:
        """Return all tasks. Raises HostFault."""
        path = "body.ScheduledTasks" if self.access.version == "v1" else "tasks"
        entries = value_at(self._ask(200, "GET", "/tasks"), path)
        if not isinstance(entries, list):
            raise self._unexpected_answer(f"the field {path} is not a list")
        return [self._task(entry) for entry in entries]

    def create(self, manifest: bytes) -> str:
        """Create a task without starting it; return its id. Raises HostFault."""
        value = self._ask(201, "POST", "/tasks", manifest)
        return self._task(value_at(value, "body") if self.access.version == "v1" else value).id

    def start(self, task: str) -> None:
        """Let snapteld start the task with the id ``task``. Raises HostFault."""
        self._ask(200, "PUT", self._action(task, "start"))

    def remove(self, names: Collection[str]) -> bool:
        """Stop and delete all tasks with these names; return whether there were any.

        Other clients may change tasks at the same time. Therefore this method repeats the deletion
        until the list has no task with these names. Raises HostFault.
        """
        found = self._tasks_named(names)
        were = bool(found)
        while found:
            for task in found:
                if task.state == "Running":
                    self._request("PUT", self._action(task.id, "stop"))
                self._request("DELETE", f"/tasks/{task.id}")
            found = self._tasks_named(names)
            if found:
                time.sleep(_AGAIN)
        return were

    def _tasks_named(self, names: Collection[str]) -> list[TaskEntry]:
        return [task for task in self.tasks() if task.name in names]

    def deadline_error(self) -> HostFault:
        """Return the error for an expired deadline."""
        said = f"; its last error: {self._refusal}" if self._refusal else ""
        return HostFault(
            f"snapteld at {self.access.url}: no success within {self._seconds:g} s{said}"
        )

    def abort(self) -> None:
        """Abort a pending request, from another thread."""
        self._until = 0.0
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _action(self, task: str, word: str) -> str:
        return f"/tasks/{task}" + (f"/{word}" if self.access.version == "v1" else f"?action={word}")

    def _ask(self, code: int, method: str, path: str, body: bytes | None = None) -> Any:
        status, value = self._request(method, path, body)
        # 204: a change has an empty answer in v2.
        if status != code and not (method == "PUT" and status == 204):
            raise HostFault(f"snapteld at {self.access.url}: {self._refusal}")
        return value

    def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """Send a request; return the answer's HTTP status and value. Raises HostFault."""
        status, data = self._exchange(method, f"/{self.access.version}{path}", body)
        if status == 401:
            user = f"user {self.access.user!r}" if self.access.password else "without a password"
            raise HostFault(f"snapteld at {self.access.url}: authentication failed ({user}): 401")
        try:
            value = json.loads(data) if data else None
        except (ValueError, RecursionError):
            raise self._unexpected_answer(f"invalid JSON {data[:60]!r} ({status})") from None
        if not 200 <= status < 300:
            said = (
                value_at(value, "body.message")
                or value_at(value, "message")
                or data[:80].decode("ascii", "replace")
            )
            self._refusal = f"{method} {path.partition('?')[0]}: {status} {ascii(said)[:200]}"
        return status, value

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        try:
            connection = self._connect(self._seconds_left())
            connection.sock.settimeout(
                self._seconds_left()
            )  # less than before: a name was looked up
            connection.request(method, path, body, self._headers)
            with connection.getresponse() as response:
                data = response.read(MAX_BYTES + 1)
        except ConnectionRefusedError:
            raise NotRunning(f"snapteld at {self.access.url}: not running") from None
        except TimeoutError:
            raise self.deadline_error() from None
        except (OSError, http.client.HTTPException) as error:
            what = str(error) or type(error).__name__
            raise HostFault(f"snapteld at {self.access.url}: {ascii(what)[:200]}") from None
        if len(data) > MAX_BYTES:
            raise self._unexpected_answer(f"the answer is larger than {MAX_BYTES >> 20} MiB")
        return response.status, data

    def _seconds_left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise self.deadline_error()
        return left

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        if self._connection is None:
            self._connection = self._make_connection(seconds)
        if self._connection.sock is None:  # at first, and when the other end has closed it
            self._connection.timeout = seconds
            self._connection.connect()
        self._socket = self._connection.sock
        return self._connection

    def _make_connection(self, seconds: float) -> http.client.HTTPConnection:
        access, url = self.access, urlsplit(self.access.url)
        if access.password:
            password = read_trusted(access.password, secret=True).rstrip(b"\r\n")
            word = base64.b64encode(access.user.encode() + b":" + password).decode("ascii")
            self._headers["Authorization"] = f"Basic {word}"
        host, port = url.hostname or "", url.port
        if url.scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=seconds)
        certificates = read_trusted(access.ca).decode("ascii", "replace")
        context = ssl.create_default_context(cadata=certificates)
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)

    def _task(self, entry: Any) -> TaskEntry:
        fields = [value_at(entry, key) for key in ("id", "name", "task_state")]
        if not all(isinstance(field, str) for field in fields) or not _ID.fullmatch(fields[0]):
            raise self._unexpected_answer(f"{ascii(entry)[:100]} is not a task")
        return TaskEntry(*fields)

    def _unexpected_answer(self, what: str) -> HostFault:
        return HostFault(
            f"snapteld at {self.access.url}: unexpected answer, is it snapteld? {what}"
        )
