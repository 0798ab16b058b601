"""JUnit XML (https://github.com/testmoapp/junitxml) with a test case per combination."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, 2.2


@dataclass(frozen=True)
class TestResult:
    """A test case, which stands for one combination.

    ``failure`` lists the conditions of ``--fail-if`` that hold; each makes the test fail. ``error``
    says why a condition cannot be evaluated, or how many points have failed.
    """

    name: str
    seconds: float
    failure: str = ""
    error: str = ""


def xml(title: str, cases: Iterable[TestResult]) -> bytes:
    """Return the content of the JUnit file."""
    found = list(cases)
    suite = ElementTree.Element(
        "testsuite", name=_text(title), tests=str(len(found)),
        failures=str(sum(bool(case.failure) for case in found)),
        errors=str(sum(bool(case.error) for case in found)),
    )  # fmt: skip
    for case in found:
        element = ElementTree.SubElement(
            suite, "testcase", classname=_text(title), name=_text(case.name),
            time=f"{case.seconds:.3f}",
        )  # fmt: skip
        for kind, said in (("failure", case.failure), ("error", case.error)):
            if said:
                ElementTree.SubElement(element, kind, message=_text(said)).text = _text(said)
    top = ElementTree.Element("testsuites")
    top.append(suite)
    body = ElementTree.tostring(top, "unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'.encode()


def _text(said: str) -> str:
    return _NOT_XML.sub("?", said)
