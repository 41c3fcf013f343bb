"""Individual training, client half: each client trains its own model on its own data, round after
round.

    paper      here            shape
    theta_k    state.params    by name, private

Departs: nothing. All clients start from the same seeded initialisation; a client that never trained
in the rounds trains alone for `new_client_epochs`.
"""

from __future__ import annotations

from . import fedavg


class Client(fedavg.Client):
    """Owns the whole model."""

    def is_own(self, name: str) -> bool:
        """Return True: nothing leaves the client."""
        return True

    def views(self) -> dict[str, str]:
        """Return the client's own model; there is no global one."""
        return {"personal": "the client's own model, trained on its own data only"}
