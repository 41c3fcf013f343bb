"""LSTM, GRU and RNN in plain operations: they can be stacked and differentiated any number of
times, and the dropout between their layers takes the numbers of a step.

torch's own kernels have no form for stacks of networks. Here the inputs of all times are multiplied
with their weights at once, in one product; each time step then needs one product for the hidden
state, of all clients together under `torch.func.vmap`. `lstm.py` has the layers of LSTMs.

    symbol      here      shape
    x_t         x[t]      (B, F): input at time t
    h_t, c_t    h, c      (B, H): hidden state and, in an LSTM, cell
    W_x, W_h    into, on  (G·H, F), (G·H, H): weights of the gates; G is 4, 3 or 1

    LSTM   i, f, g, o = W_x x + W_h h + b;  c ← σ(f) c + σ(i) tanh(g);  h ← σ(o) tanh(c)
    GRU    r, z = σ(W_x x + W_h h + b);  n = tanh(W_x x + b + r (W_h h + b'));  h ← n + z (h − n)
    RNN    h ← tanh(W_x x + W_h h + b), or relu
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .lstm import Lstm
from .randomly import dropped
from .stackable import in_bfloat16

States = tuple[Tensor, ...]  # (h,), or (h, c)
# (what the input gives to the gates, W_h h, b of W_h h, states) → states
Cell = Callable[[Tensor, Tensor, Tensor | None, States], States]


def lstm_cell(given: Tensor, on: Tensor, bias: Tensor | None, states: States) -> States:
    """Return (h, c) after one time."""
    i, f, g, o = (given + on).chunk(4, -1)
    c = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_cell(given: Tensor, on: Tensor, bias: Tensor | None, states: States) -> States:
    """Return (h,) after one time; the bias of W_h h is inside the product with r."""
    r, z, n = given.chunk(3, -1)
    hr, hz, hn = (on if bias is None else on + bias).chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (new + torch.sigmoid(z + hz) * (states[0] - new),)


def rnn_cell(act: Callable[[Tensor], Tensor]) -> Cell:
    """Return the cell of a plain recurrent network."""

    def cell(given: Tensor, on: Tensor, bias: Tensor | None, states: States) -> States:
        return (act(given + on),)

    return cell


def one_direction(x: Tensor, states: States, weights: Sequence[Tensor], cell: Cell, back: bool):  # type: ignore[no-untyped-def]
    """Return (h of all times (T, B, H), the last states) of x (T, B, F), from its end if `back`."""
    into, on, *rest = weights
    inside = cell is gru_cell  # its second bias belongs to W_h h alone
    biases, shrink = (rest[:2], rest[2:]) if len(rest) > 1 else ([], rest)
    given = x.flatten(0, 1) @ into.mT
    if biases:
        given = given + (biases[0] if inside else biases[0] + biases[1])
    given = given.unflatten(0, x.shape[:2])
    if in_bfloat16(x):  # the biases are not
        given = given.bfloat16()
    if cell is lstm_cell and not shrink:
        begin = (state.to(given.dtype) for state in states)
        ahead = given.flip(0) if back else given
        hs, c, *_ = Lstm.apply(ahead, on.to(given.dtype), *begin)
        return hs.flip(0) if back else hs, (hs[-1], c)
    times = given.unbind(0)
    own, turned = biases[1] if biases and inside else None, on.mT
    found = []
    for given in reversed(times) if back else times:
        states = cell(given, states[0] @ turned, own, states)
        if shrink:  # an LSTM whose hidden state is projected to fewer numbers
            states = (states[0] @ shrink[0].mT, *states[1:])
        found.append(states[0])
    return torch.stack(found[::-1] if back else found), states


def barred(x: Tensor) -> bool:
    """Return whether cuDNN's recurrent layers cannot be called: on a GPU, inside `torch.func`."""
    return x.is_cuda and torch._C._functorch.maybe_current_level() is not None


def without_cudnn(torchs: Callable[..., Any], *args: Any) -> Any:
    """Return what torch's own kernels give."""
    with torch.backends.cudnn.flags(enabled=False):
        return torchs(*args)


def recurrent(
    cell: Cell, number: int, only_random: bool, torchs: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function for `torchs`: a recurrent network of `cell`, with `number` states."""

    def run(*args: Any) -> Any:
        if isinstance(args[1], Tensor) and not args[1].is_floating_point():
            # sequences of different lengths, packed: (x, batch sizes, states, weights, …)
            return without_cudnn(torchs, *args) if barred(args[0]) else NotImplemented
        x, hx, weights, _, num_layers, dropout, train, bidirectional, batch_first = args
        random = train and dropout > 0 and num_layers > 1
        if only_random and not random:
            if not x.is_cuda:
                return NotImplemented
            if not barred(x):
                return torchs(*args)
        begin: States = tuple(hx) if number == 2 else (hx,)
        directions = 2 if bidirectional else 1
        each = len(weights) // (num_layers * directions)
        x = x.transpose(0, 1) if batch_first else x
        ends: list[States] = []
        for layer in range(num_layers):
            if layer and random:
                x = dropped(x, dropout)
            outputs = []
            for way in range(directions):
                place = layer * directions + way
                output, end = one_direction(
                    x,
                    tuple(state[place] for state in begin),
                    weights[place * each : (place + 1) * each],
                    cell,
                    back=way == 1,
                )
                outputs.append(output)
                ends.append(end)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        last = tuple(torch.stack([end[i] for end in ends]) for i in range(number))
        return (x.transpose(0, 1) if batch_first else x, *last)

    return run


def one_time(cell: Cell, number: int) -> Callable[..., Any]:
    """Return a function for torch's cell: one time of a recurrent network."""

    def run(
        x: Tensor,
        hx: Any,
        into: Tensor,
        on: Tensor,
        bias: Tensor | None = None,
        own: Tensor | None = None,
    ) -> Any:
        begin: States = tuple(hx) if number == 2 else (hx,)
        given, turned, last = x @ into.mT, begin[0] @ on.mT, None
        if bias is not None and own is not None:
            inside = cell is gru_cell  # its second bias belongs to W_h h alone
            given, last = given + (bias if inside else bias + own), own if inside else None
        states = cell(given, turned, last, begin)
        return states if number == 2 else states[0]

    return run


def cells() -> dict[Any, Callable[..., Any]]:
    """Return torch's functions for one time (nn.LSTMCell, GRUCell, RNNCell) and ours."""
    return {
        torch._VF.lstm_cell: one_time(lstm_cell, 2),
        torch._VF.gru_cell: one_time(gru_cell, 1),
        torch._VF.rnn_tanh_cell: one_time(rnn_cell(torch.tanh), 1),
        torch._VF.rnn_relu_cell: one_time(rnn_cell(torch.relu), 1),
    }


def functions(only_random: bool) -> dict[Any, Callable[..., Any]]:
    """Return torch's functions and ours; with `only_random`, for networks with dropout between
    layers, and on a GPU inside `torch.func.grad`, where cuDNN's cannot be called.
    """
    cells: dict[Any, tuple[Cell, int]] = {
        torch._VF.lstm: (lstm_cell, 2),
        torch._VF.gru: (gru_cell, 1),
        torch._VF.rnn_tanh: (rnn_cell(torch.tanh), 1),
        torch._VF.rnn_relu: (rnn_cell(torch.relu), 1),
    }
    return {
        torchs: recurrent(cell, number, only_random, torchs)
        for torchs, (cell, number) in cells.items()
    }
