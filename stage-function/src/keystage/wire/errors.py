"""Errors of the wire between nodes: what a process was told wrongly, and what a peer did wrongly.

Both name the thing, the bound and the actual value. This module imports nothing of the part, so that
every module of it may raise them.
"""

from __future__ import annotations


class WireError(ValueError):
    """A setting of the wire that cannot be used: names the variable and what was found."""


class PeerError(Exception):
    """A peer that did not prove itself, or broke the protocol of a tensor connection."""
