"""A change that started from an earlier model, counted from the present one (FedBuff).

    paper          here                     meaning
    w^t            now                      the model when the reply arrives
    w^(t − τ)      then                     the model that the client was sent
    w_k            update                   what it sent back
    τ              late                     server steps since then
    η s(τ)         `Aggregation.weight`     `buffer_rate` (1) times 1/√(1 + τ)

    w_k' = w^t + η s(τ) (w_k − w^(t − τ))                                                 [eq. 1]

With τ = 0 and η = 1 the update is used as it is, bit for bit. A mean of w_k' weighted by n_k is
FedBuff's step w^t + η Σ n_k s(τ_k) Δ_k / Σ n_k: weights of changes do not add up to one on purpose,
an old change moves the model less.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..contract import ServerHalf
from ..errors import ConfigError
from ..tree import map_tree, shapes


def rebased(then: Any, now: Any, update: Any, weight: float) -> Any:
    """Return an update made from the broadcast `then` as if made from `now` [eq. 1], in float64
    and rounded once; counters become whole numbers.
    """

    def moved(value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        found = new.double() + weight * (value.double() - old.double())
        return (found if value.is_floating_point() else found.round()).to(value.dtype)

    before, after = then._asdict(), now._asdict()
    changed = {
        name: map_tree(moved, value, before[name], after[name])
        for name, value in update._asdict().items()
        if name in before
    }
    return update._replace(**changed)


def check(half: ServerHalf, state: Any, client: int, name: str) -> None:
    """Raise if an update has a number that was not sent: its change is not known."""
    sent = {one: (shape, dtype) for one, shape, dtype in shapes(half.broadcast(state, client))}
    for one, shape, dtype in shapes(half.expects(state)):
        if one != "num_examples" and sent.get(one) != (shape, dtype):
            raise ConfigError(
                f"aggregation=buffered is not for {name} on this network: clients send {one!r}, "
                "which they were not sent; use aggregation=rounds"
            )
