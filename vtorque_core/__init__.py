"""vTorque runs batch jobs inside virtual machines; its public API is ``api`` and ``live``."""

__version__ = "1.0.0.dev0"
