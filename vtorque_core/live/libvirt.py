"""Call libvirt with a time limit. As root, or as the owner of a personal site.

Every call raises HostFault if libvirt fails or does not answer in time. libvirt may still complete
the call later.
"""

from __future__ import annotations

from vtorque_core.base.hypervisor import LOOKUP as LOOKUP
from vtorque_core.base.hypervisor import STAGE as STAGE
from vtorque_core.base.hypervisor import call as call
from vtorque_core.base.hypervisor import destroy_domain as destroy_domain
from vtorque_core.base.hypervisor import domain_runs as domain_runs
from vtorque_core.base.hypervisor import if_there as if_there
from vtorque_core.base.hypervisor import library as library
from vtorque_core.base.hypervisor import network_xml as network_xml
from vtorque_core.base.hypervisor import on_domain as on_domain
from vtorque_core.base.hypervisor import resume_domain as resume_domain
from vtorque_core.base.hypervisor import suspend_domain as suspend_domain
from vtorque_core.base.hypervisor import versions as versions
