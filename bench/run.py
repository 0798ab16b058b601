"""Measure vTorque's performance targets: ``python bench/run.py [NAME...]``, as root.

Needs an otherwise idle node (``scripts/node up``; for ``debian`` also ``vmgr images build debian
debian``). vTorque and the baseline are measured alternately in one run; medians are printed. Most
limits in seconds are for a reference machine, and are scaled by this machine's speed. Exits with 1
if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from pathlib import Path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure; default: all")
    parser.add_argument("--node", default="vtorque", help="name given to scripts/node")
    parser.add_argument("--rounds", type=int, default=9, help="repetitions of a start (9)")
    parser.add_argument("--json", action="store_true", help="all samples, for a program")
    return parser.parse_args()


def _in_prefix(node: str) -> None:
    """Restart with the node's own Python, to measure the installed code, not the checkout."""
    python = f"/opt/{node}/bin/python3"
    if sys.executable != python:
        if not Path(python).exists():
            sys.exit(f"bench: {python} is missing: run scripts/node up --name {node}")
        os.execv(python, [python, *sys.argv])


def main() -> int:
    """Return the exit code."""
    arguments = _arguments()
    if os.geteuid() != 0:
        sys.exit("bench: must be root, to start guests without vTorque and to see its directories")
    _in_prefix(arguments.node)
    from attacks import attacks  # noqa: PLC0415 - needs the prefix
    from figures import table  # noqa: PLC0415
    from images import images  # noqa: PLC0415
    from laptop import laptop  # noqa: PLC0415
    from measures import ALL, REFERENCE, Bench  # noqa: PLC0415
    from node import measured  # noqa: PLC0415
    from share import share  # noqa: PLC0415
    from still import checkpoint, restored, still  # noqa: PLC0415
    from warm import full, warm  # noqa: PLC0415
    from watching import watching  # noqa: PLC0415

    known = {
        **ALL,
        "share": share,
        "laptop": laptop,
        "images": images,
        "watching": watching,
        "warm": warm,
        "full": full,
        "still": still,
        "checkpoint": checkpoint,
        "restored": restored,
        "attacks": attacks,
    }
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        sys.exit(f"bench: no measurement {unknown[0]}; there are {', '.join(known)}")
    figures = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # attacks end with this
    with measured(arguments.node) as node, tempfile.TemporaryDirectory() as scratch:
        bench = Bench(node, Path(scratch), arguments.rounds)
        for name in arguments.names or known:
            sys.stderr.write(f"bench: {name}\n")
            figures += known[name](bench)
        imports = statistics.median(bench.import_times())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    machine = f"{os.cpu_count()} CPUs, Linux {platform.release()}, load {load}; "
    machine += f"imports {imports:.0f} ms of CPU (reference machine {REFERENCE:.0f} ms)"
    if arguments.json:
        shown = {"machine": machine, "figures": [figure.as_json() for figure in figures]}
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    else:
        sys.stdout.write(f"{table(figures)}{machine}\n")
    return 1 if any(figure.held is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
