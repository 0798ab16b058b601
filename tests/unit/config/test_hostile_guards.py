"""Each hostile request depends on a guard, and each guard is needed: without it, attacks succeed.

Guards are found in the source (:mod:`guards`), so a new one without an attack fails here. The
memory and CPU time of root that an attack may use is bounded, and each bound is needed too.
"""

from __future__ import annotations

import base64
import functools
import os
import pwd
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from counting import calls
from guards import Guard, guards, without
from hostile_requests import BLOBS, DAMAGED, PAIRS, SITE, TOKENS, document, token
from vtorque_core.api import submission, vm_options
from vtorque_core.api.batch_system import BatchJob, JobState, Outcome
from vtorque_core.api.submission import unpack_token
from vtorque_core.api.values import FileData
from vtorque_core.base import sizes
from vtorque_core.base.errors import Refused
from vtorque_core.config import directories, option_limits, policy, request
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml
from vtorque_core.node.shell.proof import Proof
from vtorque_core.node.start import prologue

PLUGINS = Plugins()
PLUGINS.register("core", vm_options, "vtorque-core")
CONFIG = Path("/etc/vtorque/vtorque.toml")
STRICT = build(parse_toml(SITE, CONFIG), PLUGINS)

# Answers of a compromised parser to root: parts that no document has.
PARTS = {
    "empty": [b""],
    "value without a key": [b"v=x"],
    "path as a file's key": [b"f../x=n\0"],
    "long value": [b"vimg=" + b"x" * 4097],
    "value that is not UTF-8": [b"vimg=\xff"],
    "duplicate key": [b"vimg=a", b"vimg=b"],
    "201 values": [b"vk%d=x" % n for n in range(201)],
    "17 files": [b"fk%d=n\0" % n for n in range(17)],
    "path as a file's name": [b"fimg=/etc/shadow\0"],
    "long name of a file": [b"fimg=" + b"x" * 256],
    "large file": [b"fimg=x\0" + b"x" * 65_537],
    "terminal escape sequence in the shell": [b"s=/bin/sh\x1b[2J"],
    "two shells": [b"s=/bin/sh", b"s=/bin/sh"],
    "long shell": [b"s=/" + b"x" * 4096],
}

Attack = Callable[[], object]


def decided(wanted: Request) -> object:
    return policy.decide(wanted, STRICT, PLUGINS)


ATTACKS: dict[str, Attack] = {
    **{f"bytes: {name}": lambda b=blob: Request.decode(b) for name, (blob, _) in BLOBS.items()},
    **{f"token: {name}": lambda t=text: [*unpack_token(t)] for name, (text, _) in TOKENS.items()},
    **{f"parts: {name}": lambda p=parts: Request.from_parts(p) for name, parts in PARTS.items()},
    **{
        f"{key}={value!a}": lambda k=key, v=value: decided(Request(((k, v),)))
        for key, value in PAIRS
    },
    "file in place of text": lambda: decided(Request(files={"img": FileData("micro", b"")})),
    "duplicate key that the decoder accepts": lambda: decided(
        Request((("img", "micro"),), {"img": FileData("micro", b"")})
    ),
}
# The rest is of the submit side, which runs as the user, and of other options' parsers.
GUARDS = [
    *guards(request, ("Request.from_parts", "_text", "_key", "_file")),
    *guards(request, ("unpack", "_check_size", "_json", "_unique", "_no_constant", "_object")),
    *guards(request, ("_bytes",)),
    *guards(submission, ("unpack_token",)),
    *(g for g in guards(vm_options) if g.function != "no_parse"),
    *guards(sizes, ("size_mib", "count", "boolean")),
    *guards(option_limits, ("refusal",)),
    # Two plugins with one key: not caused by an attack.
    *(g for g in guards(policy, ("check_options", "_value")) if "str(error)" not in g.text),
]


def result_of(attack: Attack) -> str:
    """Return the refusal, "accepted", or the error that would have crashed root's process."""
    try:
        attack()
    except Refused as error:
        return str(error)
    except Exception as error:
        return f"crash: {type(error).__name__}"
    return "accepted"


REFUSALS = {name: result_of(attack) for name, attack in ATTACKS.items()}


@functools.cache
def attacks_stopped_by(guard: Guard) -> frozenset[str]:
    """Return the attacks with another result without this guard."""
    with without(guard):
        return frozenset(name for name, a in ATTACKS.items() if result_of(a) != REFUSALS[name])


def test_attacks_are_distinct_and_refused_with_short_printable_text():
    assert len(set(REFUSALS)) == len(ATTACKS) >= 110
    for name, words in REFUSALS.items():
        assert words != "accepted" and not words.startswith("crash"), name
        assert words.isprintable() and len(words) < 400, name


def test_each_guard_stops_an_attack_and_each_attack_needs_a_guard():
    """Removing a guard must change the result of an attack, for each guard and each attack."""
    gone = set()
    for guard in GUARDS:
        changed = attacks_stopped_by(guard)
        assert changed, guard
        assert result_of(ATTACKS[min(changed)]) == REFUSALS[min(changed)], (
            f"{guard} was not restored"
        )
        gone |= changed
    assert gone == ATTACKS.keys()


LIMITS = {
    "MAX_REQUEST": "bytes: valid request beyond the limit",
    "MAX_PAIRS": "bytes: 201 pairs",
    "MAX_FILES": "bytes: 17 files",
    "MAX_FILE": "bytes: large file",
    "MAX_VALUE": "bytes: value of 4097 characters",
    "MAX_FILE_NAME": "bytes: long name of a file",
    "_MAX_TOKEN": "token: 400 kB",
}


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_is_needed(name, monkeypatch):
    monkeypatch.setattr(submission if name == "_MAX_TOKEN" else request, name, 1 << 40)
    assert result_of(ATTACKS[LIMITS[name]]) != REFUSALS[LIMITS[name]]


# -- Cost of an attack -----------------------------------------------------------------------------


def cost(attack: Attack) -> tuple[int, float]:
    """Return function calls, and peak MiB in addition to the attacker's data."""
    called = calls(lambda: result_of(attack))
    tracemalloc.start()
    result_of(attack)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return called, peak / (1 << 20)


@pytest.mark.parametrize("kind", ["bytes", "token", ""])
def test_attacks_cost_root_little_cpu_and_memory(kind):
    costs = {n: cost(a) for n, a in ATTACKS.items() if n.partition(": ")[0] == kind or not kind}
    assert max(called for called, _ in costs.values()) < 20_000
    assert max(mib for _, mib in costs.values()) < 8


def test_decompression_bomb_costs_much_memory_without_the_limit(monkeypatch):
    monkeypatch.setattr(submission, "MAX_REQUEST", 1 << 30)
    bomb = token(b"\1" + zlib.compress(b"[" * 20_000_000, 9))
    assert cost(lambda: [*unpack_token(bomb)])[1] > 16


def test_most_expensive_valid_request_costs_little():
    """Unpack, parse and validate a request that has everything that the limits allow."""
    half = base64.b64encode(bytes(45_000)).decode()
    blob = document(
        vm=[[f"k{n}", "x" * 20] for n in range(200)],
        files={f"f{n}": {"name": "x", "data": half} for n in range(2)},
    )
    assert 120_000 < len(blob) <= submission.MAX_REQUEST
    packed = submission.to_token(blob)
    called, mib = cost(lambda: decided(Request.decode(b"".join(unpack_token(packed)))))
    assert (called < 150_000, mib < 8) == (True, True), (called, mib)


# -- Through the whole prologue of root ------------------------------------------------------------


class ForgingBatch:
    """A node part that passes a forged request on, and records its messages."""

    def __init__(self, job: BatchJob) -> None:
        self._job, self.told = job, []

    def job(self, argv, environ):
        return self._job

    def job_states(self, ids):
        return dict.fromkeys(ids, JobState.ALIVE)

    def finish(self, job, outcome, reason, *, hook_waits):
        self.told.append((outcome, reason))
        return 0


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A separate node, which has nothing but directories: a start would end soon."""
    tmp_path.chmod(0o755)
    places = f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n'
    text = SITE + f'{places}[images]\npool = "{tmp_path}/images"\n'.encode()
    site = build(parse_toml(text, CONFIG), PLUGINS)
    for directory, mode in directories.node_directories(site):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.chmod(mode)
    return site


OWNER = pwd.getpwuid(os.getuid() or 65534).pw_name
FORGED = {
    **{name: blob for name, (blob, _) in BLOBS.items()},
    **{f"{k}={v!a}": document(vm=[[k, v]]) for k, v in PAIRS},
}


@pytest.mark.e2e
def test_prologue_refuses_all_forged_requests_and_acquires_nothing(node, tmp_path):
    """The user gets the reason, and nothing else is left on the node."""
    for number, (name, blob) in enumerate(FORGED.items()):
        job = BatchJob(f"{number}.srv", OWNER, "n1", ("n1",), blob)
        batch = ForgingBatch(job)
        assert prologue.run(batch, node, PLUGINS, (), {}) == 0
        ((outcome, reason),) = batch.told
        assert outcome is Outcome.REFUSED, (name, reason)
        if name in BLOBS:
            assert reason == DAMAGED + BLOBS[name][1]
        told = Proof.decode(node.paths.proof(job.id).read_bytes())
        assert (told.state, told.reason, told.guests) == ("refused", reason, ())
        for proof in (node.paths.proof(job.id), *node.paths.journal.iterdir()):
            proof.unlink()
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if not p.is_dir()}
    # Locks, and the records of every job for its owner, with the reason.
    held = {each for each in left if not each.startswith(("run/locks/", "state/kept/"))}
    assert held <= {"run/node.lock", "state/timelines.jsonl"}, held


def test_job_of_root_or_an_unknown_user_gets_no_guest(node):
    """An unknown user and root get no guest, whatever the request."""
    good = document()
    for owner, outcome in (("root", Outcome.REFUSED), ("no-such-user-x", Outcome.HOST_FAULT)):
        batch = ForgingBatch(BatchJob("1.srv", owner, "n1", ("n1",), good))
        prologue.run(batch, node, PLUGINS, (), {})
        assert [told for told, _ in batch.told] == [outcome]
