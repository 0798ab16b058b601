"""Contract tests for plugins: public, for test modules only (they need pytest and hypothesis).

A plugin's test module subclasses :class:`vtorque_testing.batch.BatchContract`; see
``doc/plugins.md``, "Testing a batch adapter".
"""

import pytest

pytest.register_assert_rewrite(
    "vtorque_testing.batch",
    "vtorque_testing.batch_node",
    "vtorque_testing.batch_request",
    "vtorque_testing.batch_submission",
    "vtorque_testing.live",
)
