"""The log of a real job: complete, private, without secrets or control sequences; its sinks."""

import base64
import functools
import json
import re
import shutil
import threading

import pytest

from vtorque_core.base import names
from vtorque_core.base.errors import EXIT_GUEST_DIED

pytestmark = pytest.mark.e2e

OTHER = "vte2e2"
PHASES = ["plan", "render domain", "pre-boot", "boot", "ready", "post-boot", "run"]


@pytest.fixture
def sinks(clean, config, scratch):
    """Enable joblog's files for one test; return the file of all jobs."""
    for parent in scratch.parents:
        if parent.stat().st_mode & 0o022 and not parent.stat().st_mode & 0o1000:
            pytest.fail(f"{parent} can be written by others")
    file = scratch / "jobs.jsonl"
    config("plugin.joblog", f'file = "{file}"')
    return file


def secrets_of(node, job, found):
    """Add all secrets that a log must not have: the site's, the job's, and keys in its files."""
    site = names.Paths(node.state, node.run_dir).secret.read_bytes()
    for secret in (site.strip(), names.derive(site, "job", job, 0)):
        found |= {secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")}
    for path in node.run_dir.glob("jobs/*/**/*"):
        if path.is_file() and path.stat().st_size < 1 << 20:
            found |= set(re.findall(rb"[A-Za-z0-9+/]{48,}", path.read_bytes()))


def test_log_of_a_job_is_complete_and_private(clean, sinks):
    """At TRACE, the log has every phase; only the owner can read it; no sink has a secret."""
    begun, go = clean.home / "begun", clean.home / "go"
    for path in (begun, go):
        path.unlink(missing_ok=True)
    script = "#!/bin/sh\ntouch begun; while [ ! -e go ]; do sleep 0.1; done\n"
    results = []
    thread = threading.Thread(
        target=lambda: results.append(clean.job(script, "-vm", "log=trace,show_log=true"))
    )
    thread.start()
    secrets = set()
    try:
        clean.wait_for(begun.exists, what="the script's begin")
        (key,) = [path.name for path in (clean.run_dir / "jobs").iterdir()]
        job = key.rpartition(".")[0]
        secrets_of(clean, job, secrets)
        shown = functools.partial(clean.as_user, "vmgr", "logs", job)
        clean.wait_for(lambda: b"the guests are ready after" in shown().stdout, what="the log")
        assert b"core: times" not in shown().stdout
    finally:
        go.touch()
        thread.join(120)
    (result,) = results
    assert result.code == 0 and result.out == b""

    shown = clean.as_user("vmgr", "logs", "--json", job).stdout
    entries = [json.loads(line) for line in shown.splitlines()]
    assert {e["job"] for e in entries} == {job} and len({e["node"] for e in entries}) == 1
    phases = list(dict.fromkeys(e["phase"] for e in entries if e["phase"]))
    assert phases == [*PHASES, "teardown", "release"]
    last = entries[-1]["message"]
    assert re.fullmatch(r"times: start [0-9.]+ s, run [0-9.]+ s, end [0-9.]+ s", last), last
    assert any(e["guest"] == 0 and e["message"].startswith("ready after") for e in entries)
    assert len(entries) < 120, "too many log entries"
    assert sum(e["level"] in ("INFO", "WARN", "ERROR") for e in entries) < 20

    other = clean.as_user("vmgr", "logs", job, user=OTHER, check=False)
    assert other.returncode == 2 and b"this node has no records" in other.stderr
    (place,) = clean.state.glob(f"kept/*/{key}")
    for name in ("log.jsonl", "job.json", ""):
        assert clean.as_user("/bin/cat", str(place / name), user=OTHER, check=False).stdout == b""

    # show_log: in the job's error output until the script's end, not in vsub's own output
    assert b"vtorque: " in result.err and b"the guests are ready after" in result.err
    assert b"core: times" not in result.err and b"the guests are ready" not in result.done.stderr

    clean.wait_for(lambda: b"times: start" in sinks.read_bytes(), what="the end in the site's file")
    site = sinks.read_bytes()
    assert b"begins" not in site, "the site's sink has the user's DEBUG entries"

    assert len(secrets) >= 6  # the image has no log keys; joblog's own tests cover those
    sunk = (place / "log.jsonl").read_bytes(), site, result.err, result.done.stderr
    for secret in secrets:
        assert not [text for text in sunk if secret in text]


def test_hostile_console_output_is_escaped_in_logs(clean, config, sinks):
    """Output of its crashed console: in the log, in the kept console and on the terminal."""
    scripts = clean.config.parent / "guest-prologue"
    scripts.mkdir()
    button = scripts / "10-button"
    button.write_text("#!/bin/sh\nchmod 666 /proc/sysrq-trigger /dev/console /dev/kmsg\n")
    button.chmod(0o755)
    config("plugin.linux-guest", f'prologue = "{scripts}"')
    script = (
        "#!/bin/sh\n"
        "printf '\\033]0;owned\\007\\033[2J\\377\\376 marker-one\\r\\n' > /dev/console\n"
        "head -c 50000 /dev/zero | tr '\\0' A > /dev/console\n"
        "printf '\\n\\033[31mmarker-two\\n' > /dev/console\n"
        "sleep 1\necho c > /proc/sysrq-trigger\nsleep 60\n"
    )
    try:
        result = clean.job(script)
    finally:
        shutil.rmtree(scripts)
    assert result.code == EXIT_GUEST_DIED
    job = result.done.stdout.decode().split()[0]
    shown = [
        clean.as_user("vmgr", "logs", *args, job).stdout
        for args in ((), ("--json",), ("--console",))
    ]
    (place,) = clean.state.glob(f"kept/*/{job}.0")
    kept = [path.read_bytes() for path in place.iterdir()]
    assert b"marker-two" in shown[2] and b"Kernel panic" in shown[2]
    for text in (*shown, *kept, sinks.read_bytes()):
        assert all(c.isprintable() or c == "\n" for c in text.decode())
        assert all(len(line) < 70000 for line in text.splitlines())
    assert clean.as_user("vmgr", "logs", "--console", job, user=OTHER, check=False).returncode == 2
