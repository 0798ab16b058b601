"""Contract tests for plugins: public, for test modules only (they need pytest and hypothesis).

A plugin's test module subclasses :class:`vtorque_core.testing.batch.BatchContract`; see
``doc/plugins.md``, "Testing a batch adapter".
"""

import pytest

pytest.register_assert_rewrite(
    "vtorque_core.testing.batch",
    "vtorque_core.testing.batch_node",
    "vtorque_core.testing.batch_request",
    "vtorque_core.testing.batch_submission",
    "vtorque_core.testing.live",
)
