"""Test kit for plugins: fixtures, contracts, recorded hardware of machines, and templates.

Only plugin authors and test modules use it; nodes do not need it. See ``doc/plugins.md``.
"""
