"""FedPer, client half (Arivazhagan et al. 2019, arXiv 1912.00818): base and own head trained jointly; the base is sent.

    paper      here                           shape
    W_B        broadcast.params               by name
    W_P        state.params                   by name, private: the head

Departs: a client that never trained fits a head on its training data, the base frozen.
"""

from __future__ import annotations

from . import fedavg


class Client(fedavg.Client):
    """Owns its head."""

    def is_own(self, name: str) -> bool:
        """Return whether `name` belongs to the head."""
        return name in self.model.head_names
