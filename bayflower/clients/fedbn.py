"""FedBN, client half (Li et al. 2021, ICLR): local training in which normalisation layers are the
client's own.

    paper      here            shape
    gamma_k, beta_k, running statistics    state.params, state.buffers    by name, private

Departs: a client that never trained fits its own normalisation layers on its training data, the
shared part frozen.
"""

from __future__ import annotations

from . import fedavg


class Client(fedavg.Client):
    """Owns its normalisation layers: scale, shift and running statistics."""

    def is_own(self, name: str) -> bool:
        """Return whether `name` belongs to a normalisation layer."""
        return name in self.model.norm_names

    def remark(self) -> str | None:
        """Return a line for the person if the method is not what
        its name promises on this network.
        """
        if self.model.norm_names:
            return None
        return (
            f"fedbn equals fedavg here: model {self.model.name} has no normalisation layer; "
            "use one that has, e.g. model=mlp-bn"
        )
