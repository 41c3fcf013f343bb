"""Individual training, server half: nothing is sent and nothing is learned from anyone.

    paper      here
    (none)     the identity element of the monoid, in both directions

Departs: nothing; this is the baseline called "Individual" or "local" in the papers.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import fedavg


@dataclass(frozen=True)
class Config:
    """Nothing to set."""


class Server(fedavg.Server):
    """Shares nothing: broadcasts are empty and every statistic is the count alone."""

    averages_models = False
    shares_nothing = True

    def is_shared(self, name: str) -> bool:
        """Return False: every parameter and buffer stays on its client."""
        return False
