"""A node whose guests let the job's user be root."""

import pytest

import guest_attacks


@pytest.fixture(scope="module")
def armed(node):
    with guest_attacks.armed(node):
        yield


@pytest.fixture
def guest(armed, guest):
    """Return the node, for jobs whose scripts are root in the guest; the home is emptied after."""
    return guest
