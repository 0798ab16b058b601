"""The core's resource kinds that plugins may acquire; released even with every plugin gone."""

from vtorque_core.resources import File, Mount, Process, Setting, Shm, Tree

__all__ = ["File", "Mount", "Process", "Setting", "Shm", "Tree"]
