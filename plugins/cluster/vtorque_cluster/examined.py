"""Evaluate the output of ``vtorque doctor --json`` from many nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vtorque_cluster.on_nodes import NodesAnswer, nodes_of
from vtorque_core.api.health import ALIKE

Found = dict[str, list[str]]
"""Maps each problem to the nodes that have it."""


def find_differences(answers: Iterable[NodesAnswer]) -> Found:
    """Return the failed checks, then the values that differ between nodes."""
    found: Found = {}
    alike: dict[str, Found] = {}
    for answer in answers:
        names = nodes_of(answer.nodes)
        findings = _findings(answer.text)
        if findings is None:
            said = answer.text or "no output"
            found.setdefault("no answer in time" if answer.code is None else said, []).extend(names)
            continue
        for check, status, message, fix in findings:
            if check == ALIKE and status == "ok":
                what, _, value = message.partition(": ")
                alike.setdefault(what, {}).setdefault(value, []).extend(names)
            elif status == "failed":
                said = f"{check}: {message}" + (f"\n-> {fix}" if fix else "")
                found.setdefault(said, []).extend(names)
    for what, values in alike.items():
        if len(values) > 1:
            for value, names in values.items():
                found[f"{what} differs from the other nodes: {value}"] = names
    return found


def _findings(text: str) -> list[tuple[str, str, str, str]] | None:
    """Return check, status, message and fix of each finding; None if ``text`` is not valid JSON."""
    keys = ("check", "status", "message", "fix")
    try:
        answer: list[dict[str, Any]] = json.loads(text)
        found = [tuple(str(line[key]) for key in keys) for line in answer]
    except (ValueError, KeyError, TypeError):
        return None
    return [(a, b, c, d) for a, b, c, d in found]
