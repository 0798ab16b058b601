"""Plots are drawn elsewhere, and a browser is there for a module's tests."""

from browser import browser
from drawn_elsewhere import elsewhere

__all__ = ["browser", "elsewhere"]
