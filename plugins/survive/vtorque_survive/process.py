"""Start the node's watcher from hooks and commands, without importing the watcher's code."""

from __future__ import annotations

from vtorque_core.live.node_process import NodeProcess

NAME = "survive"


class WatcherProcess(NodeProcess):
    """The watcher process, which runs while the node has jobs."""

    kind = "survive-watcher"
    name = NAME
    module = "vtorque_survive.watcher"
