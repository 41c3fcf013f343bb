"""One layer of LSTMs for stacks of networks, all times. On a GPU one kernel goes through all times
where the weights fit on the chip (`lstmwholekernels.py`), else one a time, forward and backward.
The slopes of the weights are one product.

    symbol       here    shape of one client
    W_x x_t + b  given   (T, B, 4H): what the input gives to the gates
    W_h          on      (4H, H)
    i, f, g, o   gates   (T, B, 4H): σ, σ, tanh and σ of the sums
    h_t, c_t     hs, cs  (T, B, H)

    c_t = f c_{t−1} + i g;  h_t = o tanh(c_t)

    ∂o = ∂h tanh(c) o (1 − o)          ∂c += ∂h o (1 − tanh²(c))
    ∂i = ∂c g i (1 − i)                ∂f = ∂c c_{t−1} f (1 − f)        ∂g = ∂c i (1 − g²)
    ∂h_{t−1} = W_hᵀ ∂gates             ∂c_{t−1} = ∂c f                  ∂W_h = Σ_t ∂gates_tᵀ h_{t−1}

Second derivatives are those of the plain formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import vjp

from .batched import fronts, has_kernels, on_stacks


def plain(given: Tensor, on: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return (h of all times, the last c) of one client, step by step."""
    found = []
    for one in given.unbind(0):
        i, f, g, o = (one + h @ on.mT).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        found.append(h)
    return torch.stack(found), c


class Lstm(Function):
    """(h of all times, the last c, the gates, c of all times) of given (T, B, 4H), W_h, h and c (B,
    H); the last two have no derivative.
    """

    @staticmethod
    def forward(given: Tensor, on: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        found = stacked_lstm(given[None], on[None], h[None], c[None])
        return tuple(one[0] for one in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs, output[0], *output[2:])

    @staticmethod
    def backward(ctx: Any, to_hs: Tensor, to_c: Tensor, *_: Any) -> tuple[Any, ...]:
        return Slopes.apply(to_hs, to_c, *ctx.saved_tensors)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Any, Any]:
        return on_stacks(stacked_lstm, fronts(inputs, dims, info)), (0,) * 4


class Slopes(Function):
    """The gradients of `Lstm` with respect to given, W_h, h and c."""

    @staticmethod
    def forward(to_hs: Tensor, to_c: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        found = stacked_slopes(to_hs[None], to_c[None], *(one[None] for one in saved))
        return tuple(one[0] for one in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:6])

    @staticmethod
    def backward(ctx: Any, *gg: Tensor) -> tuple[Any, ...]:
        def slopes(to_hs: Tensor, to_c: Tensor, *inputs: Tensor) -> Any:
            return vjp(plain, *inputs)[1]((to_hs, to_c))

        _, pull = vjp(slopes, *ctx.saved_tensors)  # type: ignore[misc]
        return (*pull(gg), None, None, None)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Any, Any]:
        return on_stacks(stacked_slopes, fronts(inputs, dims, info)), (0,) * 4


def stacked_lstm(given: Tensor, on: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Return (hs, the last c, gates, cs) with the clients' axis in front."""
    if has_kernels(given) and given.dtype in (torch.float32, torch.bfloat16):
        from . import lstmkernels, lstmwholekernels

        first = given.transpose(0, 1).contiguous()
        if (shape := lstmwholekernels.shape_of(h)) is None:
            found = lstmkernels.ahead(first, on, h, c)
        else:
            found = lstmwholekernels.ahead(first, on, h, c, shape)
        hs_of_all, gates_of_all, cs_of_all = (one.transpose(0, 1) for one in found)
        return hs_of_all, cs_of_all[:, -1].clone(), gates_of_all, cs_of_all
    clients, times, batch, _ = given.shape
    turned, c = on.mT.contiguous(), c.reshape(clients * batch, -1)
    rows = given.transpose(0, 1).reshape(times, clients * batch, -1)
    hs, cs, gates = [], [], []
    for one in rows.unbind(0):
        h, c, gate = cell(one, torch.bmm(h, turned).flatten(0, 1), c)
        h = h.unflatten(0, (clients, batch))
        hs.append(h)
        cs.append(c.unflatten(0, (clients, batch)))
        gates.append(gate.unflatten(0, (clients, batch)))
    # times come first in memory, so that one time is a view that needs no copy
    every = (torch.stack(found).transpose(0, 1) for found in (hs, gates, cs))
    hs_of_all, gates_of_all, cs_of_all = every
    return hs_of_all, cs[-1].clone(), gates_of_all, cs_of_all


def stacked_slopes(
    to_hs: Tensor,
    to_c: Tensor,
    given: Tensor,
    on: Tensor,
    h: Tensor,
    c: Tensor,
    hs: Tensor,
    gates: Tensor,
    cs: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients with the clients' axis in front."""
    clients, times, batch, wide = hs.shape
    if has_kernels(gates) and gates.dtype in (torch.float32, torch.bfloat16):
        from . import lstmkernels, lstmwholekernels

        one, two = (one.transpose(0, 1).contiguous() for one in (gates, cs))
        slopes = (to_hs if to_hs.stride(-1) == 1 else to_hs.contiguous()).transpose(0, 1)
        if (shape := lstmwholekernels.shape_of(h)) is None:
            found, to_begin = lstmkernels.back(slopes, to_c, on, c, one, two)
        else:
            found, to_begin = lstmwholekernels.back(slopes, to_c, on, c, one, two, shape)
        to_h = torch.bmm(found[0], on)
        return (*of_weights(found.transpose(0, 1), h, hs), to_h, to_begin)
    rows = clients * batch

    def flat(one: Tensor) -> Tensor:
        return one.reshape(rows, -1)

    to_h, to_c = torch.zeros_like(h), flat(to_c)
    steps = []
    for t in reversed(range(times)):
        before = flat(cs[:, t - 1] if t else c)
        to_gates, to_c = cell_slopes(
            flat(to_hs[:, t] + to_h), to_c, before, flat(cs[:, t]), flat(gates[:, t])
        )
        to_gates = to_gates.reshape(clients, batch, 4 * wide)
        to_h = torch.bmm(to_gates, on)
        steps.append(to_gates)
    to_given = torch.stack(steps[::-1]).transpose(0, 1)
    return (*of_weights(to_given, h, hs), to_h, to_c.reshape(c.shape))


def of_weights(to_given: Tensor, h: Tensor, hs: Tensor) -> tuple[Tensor, Tensor]:
    """Return (∂gates, ∂W_h) of all times."""
    earlier = torch.cat([h[:, None], hs[:, :-1]], 1).flatten(1, 2)
    return to_given, torch.bmm(to_given.flatten(1, 2).mT, earlier)


def cell(given: Tensor, on: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (h, c, the gates) after one time; rows are samples of all clients."""
    if given.is_cuda:
        return torch.ops.aten._thnn_fused_lstm_cell(given, on, c)  # type: ignore[no-any-return]
    i, f, g, o = (given + on).chunk(4, -1)
    gates = torch.cat([torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)], -1)
    i, f, g, o = gates.chunk(4, -1)
    c = f * c + i * g
    return o * torch.tanh(c), c, gates


def cell_slopes(
    to_h: Tensor, to_c: Tensor, before: Tensor, c: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (∂gates, before their functions; ∂c of the time before)."""
    if gates.is_cuda:
        found = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(
            to_h, to_c, before, c, gates, False
        )
        return found[0], found[1]
    i, f, g, o = gates.chunk(4, -1)
    bent = torch.tanh(c)
    to_c = to_c + to_h * o * (1 - bent * bent)
    slopes = (
        to_c * g * i * (1 - i),
        to_c * before * f * (1 - f),
        to_c * i * (1 - g * g),
        to_h * bent * o * (1 - o),
    )
    return torch.cat(slopes, -1), to_c * f
