"""Reading a kept job log that contains hostile text."""

import json
import os

from vtorque_core.api import job_log, kept_records
from vtorque_core.base.names import JobAttempt, Paths


def test_hostile_log_entries_are_skipped_or_escaped(tmp_path):
    paths = Paths(tmp_path / "state", tmp_path / "run")
    paths.state.mkdir()
    place = kept_records.place(paths, JobAttempt("42.srv", 0, "u", os.getuid()))
    descriptor = place.append("log.jsonl")
    bad = [
        *(b"{", b"[]", b"\xff", b'{"t": "x"}', b'{"t": 1e400, "guest": "g"}', b"[" * 9999),
        *(b'{"t": %s}' % word for word in (b"NaN", b"-Infinity", b"-1e400", b"1" * 400)),
        json.dumps({"t": 1, "level": "\x1b[31m", "message": "\x1b" * 9999, "detail": 7}).encode(),
        json.dumps({"t": -1e18, "detail": ["\x1b[2J"] * 999, "phase": None}).encode(),
        b"q" * (1 << 21),
    ]
    os.write(descriptor, b"\n".join([*bad, b'{"t": 2, "message": "good"}', b'{"torn": ']))
    os.close(descriptor)
    found = [job_log.text(e) for e in job_log.entries(place)]
    assert "good" in found[-1]
    json.dumps(list(job_log.entries(place)), allow_nan=False)
    assert all(c.isprintable() or c == "\n" for text in found for c in text)
