"""The contract that every batch adapter passes, the embedded one included.

    class TestMine(BatchContract):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

``MyHarness`` is a :class:`vtorque_core.testing.harness.BatchHarness`.
"""

from __future__ import annotations

from vtorque_core.names import Paths
from vtorque_core.testing.batch_node import NodeContract, ShellContract
from vtorque_core.testing.batch_request import RequestContract
from vtorque_core.testing.batch_submission import SubmissionContract
from vtorque_core.testing.commands import Call, RecordingCommand
from vtorque_core.testing.harness import (
    BatchHarness,
    Dialect,
    Ended,
    HookCall,
    OwnValue,
    PluginSite,
    ShellCall,
    StartedJob,
    Submission,
)

__all__ = [
    "BatchContract",
    "BatchHarness",
    "Call",
    "Dialect",
    "Ended",
    "HookCall",
    "OwnValue",
    "Paths",
    "PluginSite",
    "RecordingCommand",
    "ShellCall",
    "StartedJob",
    "Submission",
]


class BatchContract(SubmissionContract, RequestContract, NodeContract, ShellContract):
    """Subclass it, name it ``Test...``, and override the fixture ``harness``."""
