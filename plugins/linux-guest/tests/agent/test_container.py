"""The agent in an image made from a container: the setup's shell, environment, entry point."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_agent import HostedAgent, run, sh
from vtorque_linux_guest.job.frames import StartFailed
from vtorque_linux_guest.job.start_request import FileArg, GuestFileData, StartMode, StartRequest
from vtorque_linux_guest.job.stream import Session

pytestmark = pytest.mark.e2e  # with the agent's own: each runs the whole program

ENTRIES = ("!PATH=/bin:/usr/bin", "GREETING=image", "EMPTY=")
PLAIN = b'echo "$GREETING|$EMPTY|$PATH|$*"\n'
SCRIPT = b"#!/bin/sh\n" + PLAIN


@pytest.fixture
def home() -> Iterator[Path]:
    """A container's directory as in its image; not below pytest's, which others cannot read."""
    path = Path(tempfile.mkdtemp(prefix="vtorque-container-"))
    path.chmod(0o755)
    (path / "bin").mkdir()
    yield path
    shutil.rmtree(path)


def put(home: Path, *entries: str) -> str:
    """Write the file of entries; return the line of agent.conf."""
    (home / "container").write_text("".join(f"{e}\0" for e in entries))
    return f"container={home}\n"


def job(content: bytes = SCRIPT, mode: StartMode = StartMode.DIRECT, **env: str) -> StartRequest:
    file = GuestFileData("job", content)
    return StartRequest(argv=(FileArg("job"), "a b"), env=env, files=(file,), mode=mode)


def output(session: Session, start: StartRequest) -> str:
    status, out, err = run(session, start)
    assert (status.code, err) == (0, b"")
    return out.decode().rstrip("\n")


def test_container_environment_is_a_default_except_for_path(binary: Path, home: Path) -> None:
    with HostedAgent(binary, extra=put(home, *ENTRIES, "")) as agent:
        agent.ready()
        session = agent.session()
        assert output(session, job(PATH="/host")) == "image||/bin:/usr/bin|a b"
        assert output(session, job(GREETING="user", EMPTY="x")) == "user|x|/bin:/usr/bin|a b"
        assert output(session, job(PLAIN, StartMode.SHELL)) == "image||/bin:/usr/bin|a b"
        assert output(session, job(PLAIN)) == "image||/bin:/usr/bin|a b"
        for shell in ("", "/bin/sh"):
            words = (shell, FileArg("job"), "a b")
            start = dataclasses.replace(job(PLAIN, StartMode.LOGIN), argv=words)
            assert output(session, start) == "image||/bin:/usr/bin|a b"
        odd = {"BASH_FUNC_f%%": "() { :; }"}
        shown = output(session, StartRequest(argv=("env",), env={"PATH": "/x", **odd}))
        assert "BASH_FUNC_f%%=() { :; }" in shown
        assert "PATH=/bin:/usr/bin" in shown.splitlines()


def test_entry_point_precedes_only_commands_of_the_user(binary: Path, home: Path) -> None:
    entry = home / "entry"
    entry.write_text('#!/bin/sh\necho "entry $1:"\nshift\nexec "$@"\n')
    entry.chmod(0o755)
    with HostedAgent(binary, extra=put(home, "", str(entry), "one two")) as agent:
        agent.ready()
        session = agent.session()
        assert output(session, job(PATH="/bin")) == "entry one two:\n||/bin|a b"
        assert (
            output(session, job(PLAIN, StartMode.SHELL, PATH="/bin"))
            == "entry one two:\n||/bin|a b"
        )
        assert output(session, sh("echo site")) == "site"
        status, out, _ = run(
            session, StartRequest((), {"PATH": "/bin"}, mode=StartMode.LOGIN), b"exit 5"
        )
        assert (status.code, out) == (5, b"entry one two:\n")


def test_setup_runs_in_the_shell_of_the_containers_directory(binary: Path, home: Path) -> None:
    shell = home / "bin/sh"
    shell.write_text('#!/bin/sh\nPATH_SEEN=$PATH exec /bin/sh "$@"\n')
    shell.chmod(0o755)
    setup = f'[ "$PATH_SEEN" = {home}/bin ] || exit 9\n'
    with HostedAgent(binary, setup=setup, extra=put(home, "")) as agent:
        agent.ready()


@pytest.mark.parametrize("content", [b"", b"A=1", b"=x\0\0", b"novalue\0\0"])
def test_broken_settings_start_nothing(binary: Path, home: Path, content: bytes) -> None:
    (home / "container").write_bytes(content)
    with HostedAgent(binary, extra=f"container={home}\n") as agent:
        agent.ready()
        with pytest.raises(StartFailed, match="the container's settings"):
            run(agent.session(), job())


def test_settings_that_others_can_write_start_nothing(binary: Path, home: Path) -> None:
    line = put(home, "")
    (home / "container").chmod(0o666)
    with HostedAgent(binary, extra=line) as agent:
        agent.ready()
        with pytest.raises(StartFailed, match="the container's settings"):
            run(agent.session(), job())
