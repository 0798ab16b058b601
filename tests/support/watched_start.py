"""Start one job on a recorded node in this new process; print its duration in milliseconds.

    watched_start.py DIRECTORY JOB SNAP_URL PLUGIN...

The duration is that of a prologue: it loads the plugins and starts the job until the guest is
ready, half a second after it was resumed. If SNAP_URL is empty, snap is not used.
"""

import json
import sys
import time
from pathlib import Path

from device_cases import MACHINE
from vtorque_core.node.start import boot, prologue
from vtorque_testing.faults import run_in_child
from vtorque_testing.recorded import NoBatch, RecordedNode, load

BOOT = 0.5  # seconds of a small guest's boot with KVM


def boot_in(seconds: float) -> None:
    """Let the recorded guest be ready some time after it was resumed, as a real guest is."""
    ready: list[float] = []
    resume = boot.GuestBoot.resume

    def resume_and_note(guest: boot.GuestBoot) -> None:
        resume(guest)
        ready.append(time.monotonic() + seconds)

    boot.GuestBoot.resume = resume_and_note  # type: ignore[method-assign]
    boot.await_ready = lambda _: time.sleep(max(0.0, ready[0] - time.monotonic()))


def main() -> None:
    """Print the duration."""
    boot_in(BOOT)
    directory, job, url, *names = sys.argv[1:]
    tables = {"joblog": {"file": f"{directory}/jobs.jsonl"}} if "joblog" in names else {}
    if url:
        tables["snap"] = {"url": url, "template": f"{directory}/task.json", "timeout": 10.0}
    begun = time.perf_counter()
    plugins = load(set(names))
    loaded = time.perf_counter() - begun
    node = RecordedNode.make(Path(directory, "node"), MACHINE, plugins, tables={"plugin": tables})
    lines = (
        f"[plugin.{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items())
        for name, table in tables.items()
    )
    (node.top / "vtorque.toml").write_text("".join(lines))
    asked = {"snap": "true"} if url else {}
    took = node.top / "took"

    def work() -> None:
        with node.install_doubles():
            begun = time.perf_counter()
            prologue._run(
                node.job(asked, job), node.site, node.plugins, NoBatch(), prologue.StartHook()
            )
            took.write_text(str(time.perf_counter() - begun))

    run = run_in_child(work)
    assert not run.error, run.error
    run = run_in_child(lambda: node.release(job))
    assert not run.error, run.error
    sys.stdout.write(f"{(loaded + float(took.read_text())) * 1000:.1f}\n")


if __name__ == "__main__":
    main()
