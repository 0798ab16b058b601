"""Public, for commands that show whose a node's cores and memory are: the ledger. Root's.

It is the core's own, exported: a name imported ``as`` itself (PEP 484). Imports libvirt.
"""

from vtorque_core.plan.placement import ledger as ledger
from vtorque_core.plan.placement import node_hardware as node_hardware
from vtorque_core.plan.placement.job_cores import NodeShare as NodeShare
from vtorque_core.plan.placement.job_cores import Taken as Taken
from vtorque_core.plan.placement.topology import cpu_list as cpu_list
from vtorque_core.plan.placement.topology import show_cpus as show_cpus
from vtorque_core.records.reading import JournalState as JournalState
from vtorque_core.records.reading import walk as walk
from vtorque_core.site.load import load as load
