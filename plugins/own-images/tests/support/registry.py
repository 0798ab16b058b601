"""A registry on loopback with one account, for tests: Debian's docker-registry."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from patience import eventually

USER, PASSWORD = "ada", "secret"
# htpasswd -nbB ada secret
_ACCOUNT = "ada:$2y$05$t4xlnJOMYQVEYVl35QfDsuQhnsumRg8aTDWIOh.6PN7WxuU3JGPmy\n"


class Registry:
    """A running registry; ``name`` is its host and port."""

    def __init__(self, place: Path) -> None:
        self.place = place
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.name = f"127.0.0.1:{probe.getsockname()[1]}"
        place.mkdir()
        (place / "accounts").write_text(_ACCOUNT)
        config = {
            "version": "0.1",
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(place / "data")}},
            "http": {"addr": self.name, "secret": "x"},
            "auth": {"htpasswd": {"realm": "test", "path": str(place / "accounts")}},
        }
        (place / "config.yml").write_text(json.dumps(config))
        insecure = f'[[registry]]\nlocation = "{self.name}"\ninsecure = true\n'
        (place / ".config/containers").mkdir(parents=True)
        (place / ".config/containers/registries.conf").write_text(insecure)
        self.log_in(PASSWORD)
        self._process: subprocess.Popen[bytes] | None = None

    def log_in(self, password: str) -> None:
        """Write the user's credentials, as ``skopeo login`` does (containers-auth.json(5))."""
        word = base64.b64encode(f"{USER}:{password}".encode()).decode()
        (self.place / "auth.json").write_text(json.dumps({"auths": {self.name: {"auth": word}}}))

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which skopeo uses this registry."""
        return {"REGISTRY_AUTH_FILE": str(self.place / "auth.json"), "HOME": str(self.place)}

    def start(self) -> None:
        """Start the registry, and wait until it accepts connections."""
        program = shutil.which("docker-registry")
        assert program is not None, "docker-registry is missing: apt-get install docker-registry"
        with (self.place / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, "serve", str(self.place / "config.yml")],
                stdout=subprocess.DEVNULL, stderr=log,
                env={},  # it would read skopeo's REGISTRY_AUTH_FILE as a setting
            )  # fmt: skip
        eventually(self._accepts)

    def stop(self) -> None:
        """Stop the registry."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
            self._process = None

    def push(self, layout: Path, name: str, *options: str) -> str:
        """Copy an OCI layout to ``name`` (with a tag); return the value of ``img``.

        ``options`` are those of ``skopeo copy``.
        """
        target = f"docker://{self.name}/{name}"
        subprocess.run(
            ["skopeo", "copy", "-q", *options, f"oci:{layout}:latest", target],
            check=True, capture_output=True, env={**os.environ, **self.environment},
        )  # fmt: skip
        return target

    def blobs(self) -> list[Path]:
        """Return the files of layers, configurations and manifests."""
        return sorted((self.place / "data").rglob("blobs/sha256/*/*/data"))

    def _accepts(self) -> bool:
        host, port = self.name.split(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0
