"""Both adapters pass the contract of batch adapters, on doubles of the batch systems' commands."""

import pytest

from pbs_harness import OpenPbsHarness, TorqueHarness
from vtorque_testing.batch import BatchContract
from vtorque_testing.wild_scripts import SCRIPTS, select_few

pytestmark = pytest.mark.e2e  # whole hooks and job shells: with the whole jobs


class TestTorque(BatchContract):
    @pytest.fixture
    def harness(self, tmp_path):
        return TorqueHarness(tmp_path)

    wild, rarely = select_few(SCRIPTS)
    refused = {"line-continuation-directive.sh": "No escaped character"}  # noqa: RUF012


class TestOpenPbs(BatchContract):
    @pytest.fixture
    def harness(self, tmp_path):
        return OpenPbsHarness(tmp_path)

    refused = TestTorque.refused | {
        "array-torque.sh": "option -t",
        "feature-nodes.sh": "option -d",
        "procs-option.sh": "option -d",
    }

    wild, rarely = SCRIPTS[:3], SCRIPTS[3:]  # Torque's have the same code; these take 20 s

    def test_script_arguments_arrive_unchanged(self):
        """OpenPBS 23.06 has no -F; ``-- command args`` is in test_submitter.py."""
