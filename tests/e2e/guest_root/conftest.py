"""A node whose guests give root to the job's user."""

import pytest

import guest_attacks


@pytest.fixture(scope="module")
def armed_node(node):
    with guest_attacks.armed(node):
        yield


@pytest.fixture
def guest(armed_node, guest):
    """Return the node, for jobs that run as root in the guest; the home is emptied after."""
    return guest
