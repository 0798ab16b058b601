"""Both adapters pass the contract of batch adapters, on doubles of the batch systems' commands."""

import pytest

from pbs_harness import OpenPbsHarness, TorqueHarness
from vtorque_core.testing.batch import BatchContract
from vtorque_core.testing.wild_scripts import SCRIPTS, each_sixth


class TestTorque(BatchContract):
    @pytest.fixture
    def harness(self, tmp_path):
        return TorqueHarness(tmp_path)

    @pytest.mark.parametrize("wild", each_sixth(SCRIPTS))
    def test_scripts_as_found_in_the_wild(self, harness, wild):
        super().test_scripts_as_found_in_the_wild(harness, wild)

    refused = {"line-continuation-directive.sh": "No escaped character"}  # noqa: RUF012


class TestOpenPbs(BatchContract):
    @pytest.fixture
    def harness(self, tmp_path):
        return OpenPbsHarness(tmp_path)

    refused = TestTorque.refused | {"array-torque.sh": "option -t"}

    @pytest.mark.full  # Torque's are the same code; these are 20 s
    @pytest.mark.parametrize("wild", SCRIPTS, ids=lambda wild: wild.name)
    def test_scripts_as_found_in_the_wild(self, harness, wild):
        super().test_scripts_as_found_in_the_wild(harness, wild)

    def test_the_scripts_arguments(self):
        """OpenPBS 23.06 has no -F; ``-- command args`` is in test_submission.py."""
