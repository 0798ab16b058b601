"""The node's watcher as hooks and commands see it. A hook imports this and not the watcher."""

from __future__ import annotations

from vtorque_core.live.node_process import NodeProcess

NAME = "survive"


class Watcher(NodeProcess):
    """Started with the first job of a node, ended with the last: see the module that it runs."""

    kind = "survive-watcher"
    name = NAME
    module = "vtorque_survive.watcher"
