"""Contract that every batch adapter passes, including vTorque's own.

Example::

    class TestMine(BatchContract):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

``MyHarness`` is a :class:`vtorque_testing.harness.BatchHarness`.
"""

from __future__ import annotations

from vtorque_testing.batch_node import NodeContract, ShellContract
from vtorque_testing.batch_request import RequestContract
from vtorque_testing.batch_submission import SubmissionContract


class BatchContract(SubmissionContract, RequestContract, NodeContract, ShellContract):
    """Tests of a batch adapter. Subclass as ``Test...`` and override the fixture ``harness``."""
