"""FedRep, client half (Collins et al. 2021, ICML): first the head, the representation frozen; then
the representation, the head frozen.

    paper      here                 shape
    phi        broadcast.params     by name
    h_i        state.params         by name, private
    tau        config.head_epochs   ()

    h_i = tau epochs from the last h_i on f_i(h, phi)                                  [eq. 1]
    phi_i = local epochs from phi on f_i(h_i, phi)                                     [eq. 2]

Departs: epochs instead of single gradient steps in both phases; each phase has a fresh optimiser.
"""

from __future__ import annotations

from ..contract import Phase, Purpose
from . import fedper


class Client(fedper.Client):
    """Owns its head, and trains head and representation in turn."""

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return the head's epochs [eq. 1], then the representation's [eq. 2], in a round and
        before a test alike.
        """
        if purpose != "train":
            return super().phases(purpose)
        head = tuple(name for name in self.model.anatomy.trainable if self.is_own(name))
        base = tuple(name for name in self.model.anatomy.trainable if not self.is_own(name))
        return (
            self.training.phase("head", epochs=self.config.head_epochs, trainable=head),
            self.training.phase("base", trainable=base),
        )
