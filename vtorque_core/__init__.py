"""vTorque runs batch jobs inside virtual machines; its public API is ``vtorque_core.api*``."""

__version__ = "1.0.0.dev0"
