"""Reptile, client half (Nichol, Achiam and Schulman 2018, arXiv 1803.02999): FedAvg's local
training, then a step before a test.

    paper      here                shape
    phi        broadcast.params    by name
    W_i        work.params         by name: after the local steps
    k          local_steps         number of local steps (or local_epochs)

    W_i = k steps of the optimiser on the mean loss, from phi                           [eq. 2]

Departs: a test is preceded by `adapt_steps` steps with the optimiser of local training, on batches
of the client's training data; a client that never trained does the same.
"""

from __future__ import annotations

from ..contract import Phase, Purpose
from . import fedavg

ADAPT = "adapt"  # the phase before a test


class Client(fedavg.Client):
    """Trains from the global model, and takes a few steps more before a test."""

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training [eq. 2]; a few steps before a test, of clients old
        and new.
        """
        if purpose == "train":
            return (self.training.phase("local"),)
        return (self.adaptation(),) if self.config.adapt_steps else ()

    def adaptation(self) -> Phase:
        """Return the steps before a test."""
        return Phase(
            ADAPT,
            self.training.make_optimizer(),
            self.training.batch_size,
            steps=self.config.adapt_steps,
        )

    def views(self) -> dict[str, str]:
        """Return the personal model and the global one."""
        tuned = (
            f"the global model after {self.config.adapt_steps} step(s) of adaptation on the "
            "client's training data"
        )
        personal = tuned if self.config.adapt_steps else "the global model (adapt_steps is 0)"
        return {"personal": personal, "global": "the global model of the last round"}
