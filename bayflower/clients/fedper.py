"""FedPer, client half (Arivazhagan et al. 2019, arXiv 1912.00818): base and own head trained
jointly; the base is sent.

    paper      here                           shape
    W_B        broadcast.params               by name
    W_P        state.params                   by name, private: the head

All methods that cut a model into base and head reuse this half. They are tested twice: "before" is
the shared part of the last round with the own part, as they are; "personal" is that model after one
more local training, as a client would use it.

Departs: a client that never trained fits a head on its training data, the base frozen; that is its
personal model. The paper does not say whether a model is tested before or after local training.
"""

from __future__ import annotations

from ..contract import Phase, Purpose
from . import fedavg


class Client(fedavg.Client):
    """Owns its head."""

    needs_base = True

    def is_own(self, name: str) -> bool:
        """Return whether `name` belongs to the head."""
        return name in self.model.head_names

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training, in a round and before a test alike; the own part
        alone for a new client.
        """
        return self.phases("train") if purpose == "finetune" else super().phases(purpose)

    def views(self) -> dict[str, str]:
        """Return the model after and before local training."""
        model = "the shared part of the last round with the client's own part"
        return {
            "personal": f"{model}, after local training: of both as in a round; of a client that "
            "never trained, of its own part alone",
            "before": f"{model}, before local training",
        }
