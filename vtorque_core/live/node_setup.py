"""Parts of the node that ``vtorque setup`` prepares and ``vtorque doctor`` checks. As root."""

from __future__ import annotations

from vtorque_core.base import kvm as kvm
from vtorque_core.base.trust import require_tree as require_tree
from vtorque_core.config import directories as directories
from vtorque_core.config.schema import ExtraNetwork as ExtraNetwork
from vtorque_core.plan import host_ids as host_ids
from vtorque_core.plan.guest_network import AnyNetwork as AnyNetwork
from vtorque_core.plan.guest_network import all_networks as all_networks
from vtorque_core.plan.placement import node_hardware as node_hardware
from vtorque_core.records.reading import SPARE_PREFIX as SPARE_PREFIX
from vtorque_core.resources import netfilter as netfilter
from vtorque_core.resources.virtiofs_daemon import VIRTIOFSD as VIRTIOFSD
