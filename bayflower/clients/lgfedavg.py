"""LG-FedAvg, client half (Liang et al. 2020, arXiv 2001.01523): own feature extractor and shared
head, trained jointly.

    paper      here                shape
    theta^l_k  state.params        by name, private: everything but the head
    theta^g    broadcast.params    by name: the head

Departs: a client that never trained fits its own extractor to the shared head, which stays frozen.
"""

from __future__ import annotations

from . import fedper


class Client(fedper.Client):
    """Owns everything but the head."""

    def is_own(self, name: str) -> bool:
        """Return whether `name` lies outside the head."""
        return name not in self.model.head_names
