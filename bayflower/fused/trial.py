"""A network tried as the fused engine uses it: can clients be stacked, and what else works?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ..errors import ConfigError, unmapped
from ..maths import curvature, meta
from ..networks.model import Batch, Model
from ..stacked import chance
from ..tree import Tensors

TWO, FEW = 2, 3  # clients, and samples of each


class Trial(NamedTuple):
    """Why something does not work, by what it is; None where it does. `draws`: whether the network
    has random layers.
    """

    training: str | None
    second_derivatives: str | None
    curvature: str | None
    draws: bool


def tried(model: Model, x: Tensor) -> Trial:
    """Return what works with a stack of the network, on inputs like x (samples, …)."""
    clients = torch.stack([x[torch.arange(FEW) % len(x)]] * TWO)
    stacked = model.for_stacks(gpu=x.device.type == "cuda")
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    params, buffers = (
        {name: torch.stack([value.to(x.device)] * TWO) for name, value in part.items()}
        for part in model.initial(0, dtype)
    )
    y = torch.arange(FEW, device=x.device) % 2
    mask = torch.ones(FEW, dtype=dtype, device=x.device)

    def loss(x: Tensor) -> meta.Loss:
        def one(params: Tensors, buffers: Tensors, group: int) -> tuple[Tensor, Tensors]:
            logits, after = stacked.forward(params, buffers, x, train=True, mask=mask)
            return stacked.mean_nll(logits, y, mask), after

        return one

    def first(params: Tensors, buffers: Tensors, x: Tensor) -> Any:
        return meta.descend(loss(x), params, buffers, meta.Way(tuple(params), 0.1))

    def second(params: Tensors, buffers: Tensors, x: Tensor) -> Any:
        return meta.second_order(loss(x), params, buffers, meta.Way(tuple(params), 0.1))

    def curved(params: Tensors, buffers: Tensors, x: Tensor) -> Any:
        return curvature.diagonal(stacked, params, buffers, Batch(x, y, mask))

    def why(fn: Callable[..., Any]) -> str | None:
        try:
            keys = torch.zeros(TWO, dtype=torch.int64, device=x.device)
            vmap(chance.within(fn))(keys, params, buffers, clients)
        except (RuntimeError, NotImplementedError, ValueError, ConfigError) as error:
            return why(fn) if stacked.seen.again(error) else unmapped(error)
        return None

    training = model.unstackable or why(first)
    return Trial(training, why(second), why(curved), bool(stacked.draws))
