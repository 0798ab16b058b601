"""Client of OSv's REST API (modules/httpserver-api), limited to the requests that jobs need.

The server has no authentication and uses HTTP/1.0. It does not report exit statuses, which appear
only on the console.
"""

from __future__ import annotations

import http.client
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

PORT = 8000
POLL = 0.05  # seconds between two requests
_ASK = 5.0  # seconds for one answer
_NO_ANSWER = 0.3  # seconds: the machine powers off without closing its connections


class RestError(Exception):
    """The server rejected a request, or failed. The message gives the reason."""


@dataclass(frozen=True)
class Rest:
    """The REST server of one guest."""

    host: str
    port: int = PORT
    timeout: float = _ASK

    def wait(self, deadline: float, stop: Callable[[], bool] = lambda: False) -> str:
        """Wait for the server; return OSv's version.

        Raises RestError after ``deadline`` (time.monotonic()), or if ``stop`` returns True.
        """
        while not stop():
            try:
                return str(json.loads(self._ask("GET", "/os/version")))
            except (OSError, http.client.HTTPException, ValueError, RestError) as error:
                if time.monotonic() > deadline:
                    raise RestError(f"no answer from {self.host}:{self.port}: {error}") from None
                time.sleep(POLL / 2)
        raise RestError("OSv has ended")

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable for programs that start later."""
        self._ask("POST", f"/env/{quote(name, safe='')}?val={quote(value, safe='')}")

    def upload(self, path: str, content: bytes) -> None:
        """Write a file below /tmp. In a read-only directory, the server would hang.

        The request's body is a form (RFC 7578). For another body the server would write nothing,
        but answer 200.
        """
        boundary = uuid.uuid4().hex
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="file"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        body = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        self._ask("POST", f"/file/{quote(path, safe='')}", body, kind)

    def start(self, command: str) -> list[str]:
        """Start one program without waiting for it; return its thread ids. ``;`` is not allowed."""
        said = json.loads(self._ask("PUT", f"/app/?command={quote(command, safe='')}"))
        return str(said).split()

    def is_finished(self, tid: str) -> bool:
        """Return whether a program has ended; also True for an unknown id."""
        return bool(json.loads(self._ask("GET", f"/app/finished?tid={quote(tid)}")) == "1")

    def power_off(self) -> None:
        """Shut OSv down. OSv then sends no answer and does not close the connection."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request("POST", "/os/shutdown")
            connection.sock.settimeout(_NO_ANSWER)
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return
        finally:
            connection.close()

    def _ask(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
    ) -> bytes:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request(method, target, body=body, headers=dict(headers))
            answer = connection.getresponse()
            data = answer.read(1 << 20)
            if answer.status != http.client.OK:
                reason = data.decode("utf-8", "replace")[:300]
                raise RestError(f"{method} {target}: {answer.status} {reason}")
            return data
        finally:
            connection.close()
