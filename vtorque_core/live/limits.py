"""Limits of requests in the config, and where they are set."""

from vtorque_core.base.names import CONFIG_PATH as CONFIG_PATH
from vtorque_core.site.config import Site as Site
from vtorque_core.site.job_limits import OF_BATCH as OF_BATCH
from vtorque_core.site.job_limits import Facts as Facts
from vtorque_core.site.job_limits import facts_of_user as facts_of_user
from vtorque_core.site.load import load as load
from vtorque_core.site.option_limits import effective_default as effective_default
from vtorque_core.site.option_limits import shown as shown
from vtorque_core.site.plugins import Plugins as Plugins
from vtorque_core.site.policy import for_job as for_job
