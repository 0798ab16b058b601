"""Torque's real node part on a node of the doubles, with a quick start: also for their hooks."""

from vtorque_core.api import Paths
from vtorque_pbs.settings import Settings
from vtorque_pbs.torque.node import TorqueNode


class TorqueSite:
    """The needed part of the site config."""

    def __init__(self, paths, settings):
        self.paths, self.settings = paths, settings

    def __getitem__(self, _settings):
        return self.settings


def adapter_at(root, node):
    """Return the node part of ``node``; ``root`` is the double's directory."""
    paths = Paths(root / "state", root / "run", root / "jobshell")
    settings = Settings(bindir=str(root / "bin"), node=node, home=str(root / node))
    return TorqueNode(TorqueSite(paths, settings), settings)
