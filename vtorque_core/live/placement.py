"""Show which jobs hold a node's cores and memory. As root; needs libvirt."""

from vtorque_core.plan.placement import ledger as ledger
from vtorque_core.plan.placement import node_hardware as node_hardware
from vtorque_core.plan.placement.model import Leases as Leases
from vtorque_core.plan.placement.model import NodeShare as NodeShare
from vtorque_core.plan.placement.topology import cpu_list as cpu_list
from vtorque_core.plan.placement.topology import show_cpus as show_cpus
from vtorque_core.records.reading import JournalState as JournalState
from vtorque_core.records.reading import walk as walk
