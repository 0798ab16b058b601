"""What plugins are tested with, and written from: fixtures, contracts, a recorded node, templates.

For authors and test modules only; a node has none of it. See ``doc/plugins.md``.
"""
