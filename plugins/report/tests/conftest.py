"""Plots are drawn by a separate process; fixtures include a browser per module."""

from browser import browser
from drawn_elsewhere import draw_elsewhere

__all__ = ["browser", "draw_elsewhere"]
