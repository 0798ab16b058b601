"""Guest root is mapped to an unused id on the host, a different one for each user."""

import os

import pytest

from vtorque_admin.doctor import subordinate_id_rule
from vtorque_core.base.errors import HostFault
from vtorque_core.plan.host_ids import MAX_ID, root_id


@pytest.fixture
def tables(tmp_path):
    """Return both tables; the test writes their contents."""
    found = tmp_path / "subuid", tmp_path / "subgid"
    for table in found:
        table.write_text("# a comment\nada:100000:65536\n1007:200000:65536\nbad:x:y\n")
    return found


def test_users_get_distinct_ids(tables):
    first, second = (root_id("u", uid, 2147000000, tables) for uid in (1000, 1001))
    assert (first, second) == (2147001000, 2147001001)
    assert root_id("u", 1000, 2147000000, ()) == first, "the id depends on the node's tables"


def test_subordinate_tables_of_the_site_are_used(tables):
    assert root_id("ada", 1000, 0, tables) == 100000
    assert root_id("bob", 1007, 0, tables) == 200000, "a table entry by uid is ignored"
    with pytest.raises(HostFault, match="have no ranges of user eve"):
        root_id("eve", 1008, 0, tables)
    tables[1].write_text("ada:300000:65536\n")
    with pytest.raises(HostFault, match="have no ranges of user ada"):
        root_id("ada", 1000, 0, tables)


@pytest.mark.parametrize(
    ("base", "uid", "why"),
    [
        (99000, 1500, "belongs to ada"),
        (199000, 1500, "belongs to 1007"),
        (MAX_ID, 1, "the largest id"),
    ],
)
def test_ids_of_other_users_are_refused(tables, base, uid, why):
    with pytest.raises(HostFault, match=why):
        root_id("u", uid, base, tables)


def test_uid_of_a_real_user_is_refused(tables):
    with pytest.raises(HostFault, match="the uid of "):
        root_id("u", os.getuid() + 65533 if os.getuid() == 0 else 1, 1, tables)


def test_rule_of_equal_tables_is_equal(tables):
    assert subordinate_id_rule(7, tables) == "7 + uid"
    one = subordinate_id_rule(0, tables)
    tables[0].write_text("1007:200000:65536\nada:100000:65536\n")
    assert subordinate_id_rule(0, tables) == one, "the rule depends on the order of entries"
    tables[1].write_text("1007:200000:65536\n")
    assert subordinate_id_rule(0, tables) != one
    tables[0].rename(tables[1])
    assert subordinate_id_rule(0, tables) != one
