"""``vmgr ps --phase`` asks nodes, where a job's user may answer."""

import pytest

from vtorque_core.cli import jobs


@pytest.mark.parametrize("script", ["exec yes", "exec sleep 1000", "sleep 1000 & exec sleep 1000"])
def test_an_answer_without_an_end_is_given_up(monkeypatch, script):
    monkeypatch.setattr(jobs, "_LONGEST", 0.2)
    answer, words = jobs._bounded(["/bin/sh", "-c", script])
    assert len(answer) == (jobs._MOST if script == "exec yes" else 0) and words == b""


def test_what_a_node_says_is_returned():
    said = jobs._bounded(["/bin/sh", "-c", "echo phase; echo why >&2; exit 3"])
    assert said == (b"phase\n", b"why\n")
