"""Contract for the transport of requests: root reads exactly what vsub sends."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vtorque_core.api.submission import MAX_REQUEST, to_token
from vtorque_core.base.errors import Refused
from vtorque_core.config.request import Request
from vtorque_testing.batch_base import VM, ContractBase, attempt, request_of, script, submit
from vtorque_testing.harness import BatchHarness, Submission

EXAMPLES = settings(
    max_examples=max(2, settings().max_examples // 8),  # each starts several processes
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
        HealthCheck.too_slow,
    ],
)
HOSTILE = [
    "'\"`", "a b\tc", "new\nline", "x,y,,z", "k=v:w;x|y", "back\\slash\\", "é€漢🐍",
    "<a b='&'/>]]>", "$(id)${HOME}`id`", "\x7f\x01\x1b[0m", "%s%n", "-vm", "--", "#PBS -N x",
    "other=vt1:A", "*?[~]",
]  # fmt: skip
FORGED = [
    "", "x", "mine", "vt1", "vt0:AAAA", "VT1:AAAA", "vt1:", "vt1:%%%", "vt1:A", "vt1:AQ",
    "vt1:AAAA", "vt1:AXic", "vt1:é", "vt1:AA==", "vt1:\x7f", "vt1:AAvt1:AA", "vt1:AGFi",
    "vt1:" + "A" * 1500,
]  # fmt: skip
# Valid values of -vm: without commas and NUL, and not only blanks.
VALUES = st.text(
    st.characters(exclude_characters=",\0", exclude_categories=["Cs"]), min_size=1, max_size=60
).filter(lambda value: value.strip() != "")


class RequestContract(ContractBase):
    """Tests of the transport of a request from vsub to the node."""

    @EXAMPLES
    @given(note=st.one_of(st.sampled_from([v for v in HOSTILE if "," not in v]), VALUES))
    def test_value_arrives_unchanged(self, harness: BatchHarness, note: str) -> None:
        """Any characters in a ``-vm`` value must arrive unchanged."""
        got = submit(harness, "-vm", f"note={note}", script(harness))
        assert request_of(harness, got).pairs == (("note", note.strip()),)

    @EXAMPLES
    @given(blob=st.one_of(st.sampled_from(HOSTILE).map(str.encode), st.binary(max_size=600)))
    def test_any_bytes_arrive(self, harness: BatchHarness, blob: bytes) -> None:
        """The adapter must transport any bytes without interpreting them."""
        got = submit(harness, script(harness), blob=blob)
        assert harness.start(got).hooks[0].job().blob == blob

    def test_user_file_arrives_unchanged(self, harness: BatchHarness) -> None:
        """A file that an option names must be read at submission, and sent with the request."""
        content = bytes(range(256))
        (harness.directory / "pro'logue").write_bytes(content)
        got = submit(harness, "-vm", "script=pro'logue", script(harness))
        found = request_of(harness, got)
        assert (found.files["script"].name, found.files["script"].content) == ("pro'logue", content)

    def test_request_of_the_declared_length_arrives(self, harness: BatchHarness) -> None:
        """An incompressible request with the maximum size, ``Dialect.carries``, must arrive."""
        blob = noise(harness.dialect.carries)
        got = submit(harness, script(harness), blob=blob)
        assert harness.start(got).hooks[0].job().blob == blob

    @pytest.mark.parametrize(
        "size",
        [
            *(500, 1600, 20_000, MAX_REQUEST),
            *(
                pytest.param(size, marks=pytest.mark.full)
                for size in (1000, 1400, 1500, 2048, 4096, 60_000, 100_000)
            ),
        ],
    )
    def test_request_arrives_completely_or_is_refused(
        self, harness: BatchHarness, size: int
    ) -> None:
        """A request that is too long must be refused at submission. The error names the limit.

        A job must never be created without its request, or with only a part of it.
        """
        blob = noise(size)
        ended, got = attempt(harness, script(harness), blob=blob)
        if ended.code == 0:
            assert got is not None
            assert harness.start(got).hooks[0].job().blob == blob
        else:
            assert got is None, "a job was created without its request"
            assert size > harness.dialect.carries
            assert b"limit" in ended.stderr
            assert any(chr(c).isdigit() for c in ended.stderr), ended.stderr
            assert b"Traceback" not in ended.stderr

    def test_user_values_in_the_request_field_are_kept(self, harness: BatchHarness) -> None:
        """User values in the field that carries the request must be preserved."""
        name = script(harness)
        for own in harness.dialect.own:
            assert own.kept(submit(harness, *own.argv, name)), own.argv
            got = submit(harness, *own.argv, *VM, name)
            assert own.kept(got), own.argv
            assert request_of(harness, got).pairs == (("ram", "1G"),)

    def test_bare_metal_job_has_no_request(self, harness: BatchHarness) -> None:
        """A bare-metal job must have no request, even if the user sets the field for requests."""
        name = script(harness)
        for argv in ((), *(own.argv for own in harness.dialect.own)):
            job = harness.start(submit(harness, *argv, name)).hooks[0].job()
            assert (job.blob, job.bad_request) == (None, "")

    def test_forged_request_is_reported_as_bad(self, harness: BatchHarness) -> None:
        """``job()`` must report a forged request as bad, and must not raise.

        A damaged request must never turn a VM job into a bare-metal job.
        """
        got = submit(harness, *VM, script(harness))
        faults = {}
        for text in FORGED:
            try:
                job = harness.start(got, forged=text).hooks[0].job()
            except Exception as error:
                faults[text] = f"{type(error).__name__}: {error}"
                continue
            if not text.startswith("vt1:"):
                continue
            if job.blob is None:
                faults[text] = "a damaged request must not become a bare-metal job"
            elif not is_bad(job.blob, job.bad_request):
                faults[text] = "is no bad request"
        assert faults == {}

    @EXAMPLES
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=300))
    def test_any_text_as_a_request_raises_nothing(self, harness: BatchHarness, text: str) -> None:
        """``job()`` must not raise for any request text, because the job's owner controls it."""
        got = self.submitted_job(harness)
        harness.start(got, forged=text.replace("\0", "")).hooks[0].job()
        harness.start(got, forged="vt1:" + text.replace("\0", "")).hooks[0].job()

    @EXAMPLES
    @given(cut=st.integers(1, 40), at=st.floats(0, 1))
    def test_truncated_request_is_reported_as_bad(
        self, harness: BatchHarness, cut: int, at: float
    ) -> None:
        """A request that lacks bytes, at its end or elsewhere, must be reported as bad."""
        token = to_token(Request((("ram", "1G"), ("note", "x" * 30))).encode())
        place = 4 + int(at * (len(token) - 5))
        forged = token[:place] + token[place + cut :]
        job = harness.start(self.submitted_job(harness), forged=forged).hooks[0].job()
        assert job.blob is not None
        assert is_bad(job.blob, job.bad_request)

    def submitted_job(self, harness: BatchHarness) -> Submission:
        """Return a VM job that is submitted once per test, for all examples of Hypothesis."""
        if getattr(self, "_submitted", None) is None:
            self._submitted = submit(harness, *VM, script(harness))
        return self._submitted


def noise(size: int) -> bytes:
    """Return incompressible bytes, equal for equal sizes."""
    return random.Random(size).randbytes(size)  # noqa: S311 (no secret)


def is_bad(blob: bytes, bad_request: str) -> bool:
    """Return True if the node would refuse a job with this request."""
    try:
        Request.decode(blob)
    except Refused:
        return True
    return bad_request != ""
