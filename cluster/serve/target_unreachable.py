"""The answer of targeted dispatch to a replica that cannot be reached.

In a module of its own: Serve pickles the module of a request router by value, so a class defined there would be a copy
in the process that raises it, and no `except` elsewhere would know it.
"""

from __future__ import annotations


class TargetUnreachable(RuntimeError):
    """The named replica is not running as far as this process knows, or it turned the request away."""
