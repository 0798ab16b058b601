"""The resources of a guest that the core acquires."""

from types import SimpleNamespace

from vtorque_core.api.libvirt_domain import Interface
from vtorque_core.node.start import start_order
from vtorque_core.resources.netfilter import Netfilter
from vtorque_core.site.config import Site

GUARD = "table inet guard {}\n"


def test_limit_of_a_nic_does_not_depend_on_the_order_of_nics(monkeypatch):
    """The guard of one network makes the node track connections, those of a bridge before it, too.

    A filter without a guard has no limit on a node that does not track connections yet.
    """
    monkeypatch.setattr(start_order, "root_disks", lambda *_: [])
    monkeypatch.setattr(start_order, "daemons", lambda *_: [])
    nics = [
        Interface("lab", "bridge", "br7", "52:54:00:00:00:01"),
        Interface("main", "network", "vtorque", "52:54:00:00:00:02"),
    ]
    guest = SimpleNamespace(merged=SimpleNamespace(lists=lambda _: nics))
    filters = list(start_order._guest_resources(guest, Site(), GUARD))
    assert [type(each) for each in filters] == [Netfilter, Netfilter]
    assert [each.guard for each in filters] == [GUARD, GUARD]
    assert {each.connections for each in filters} == {Site().network.max_connections}
