"""The diagonal of a network's curvature, summed over samples: exact, by per-sample gradients, for
clients alone or stacked.

    symbol     here               meaning
    f          logits             (B, K) outputs of the network
    p          probabilities      of the classes, under the model itself
    S          columns            (C, B, K): Σ_c S_c S_cᵀ is the Hessian of −log p(y|f) in f
    h          result             by parameter: Σ_samples Σ_c ((∂f/∂w)ᵀ S_c)²

Kinds of curvature

    fisher     S_c = √p_c (e_c − p), one column a class (one logit: √(p(1−p)), one column): the
               expectation of squared gradients over the model's own labels. It is the diagonal of
               the generalised Gauss-Newton matrix, and of the Hessian itself where the output is
               piecewise linear in each single weight (ReLU, LeakyReLU, max-pooling, BatchNorm in
               evaluation mode).
    sketch     S = Σ_c ±√p_c (e_c − p), one column with signs that differ from sample to sample: its
               square is that of `fisher` plus products of two classes, which cancel on average over
               signs. A tenth of the work for ten classes; the error falls as 1/√samples.
    empirical  S = e_y − p, one column: squared gradients at the true labels. The work of `sketch`,
               and not the Hessian.

Squares must be taken sample by sample. In a Linear, Conv2d or BatchNorm layer a sample's gradient
is a product of the layer's input and the gradient at its output, so one backward pass to the
outputs, for all columns at once, is enough: Linear layers never form a gradient, convolutions form
them one layer at a time (`formulas.py`). Every other layer, and one that is used twice, gets
per-sample gradients by `torch.func.vmap`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from ..errors import ConfigError
from ..networks.model import Batch, Model
from ..stacked.rewriting import used
from ..tree import Tensors
from .formulas import by_formulas, make_plan
from .gradients import are_plain, vjp

Kind = Literal["fisher", "sketch", "empirical"]


def diagonal(
    model: Model, params: Tensors, buffers: Tensors, batch: Batch, kind: Kind = "fisher"
) -> Tensors:
    """Return h = Σ_samples Σ_c ((∂f/∂w)ᵀ S_c)² by parameter, in evaluation mode; masked samples
    contribute nothing.
    """
    check_alone(model)
    if are_plain():
        return one_after_another(model, params, buffers, batch, kind)
    # samples are mapped, of clients alone too; without gradients around it, torch's derivative of
    # linalg.solve is wrong when it is mapped twice
    with torch.enable_grad(), used("mapped"):
        return found(model, params, buffers, batch, kind)


def check_alone(model: Model) -> None:
    """Raise if a sample has no curvature of its own."""
    if model.manner.mixes_in_tests:
        raise ConfigError(
            f"curvature is a sum over samples, but in model {model.name or 'given'} a sample's "
            "outputs depend on the other samples of its batch; use a method without curvature"
        )


def one_after_another(
    model: Model, params: Tensors, buffers: Tensors, batch: Batch, kind: Kind
) -> Tensors:
    """Return h as it is defined, from one gradient a sample and column: for networks that can be
    differentiated by plain autograd alone.
    """
    result = {name: torch.zeros_like(value) for name, value in params.items()}
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        for place in range(batch.x.shape[0]):
            x, y, mask = (part[place : place + 1] for part in batch)
            logits, _ = model.forward(leaves, buffers, x, train=False)
            columns = columns_of(model, logits.detach(), Batch(x, y, mask), kind)
            for column in columns:
                slopes = torch.autograd.grad(
                    logits,
                    list(leaves.values()),
                    column,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                for name, slope in zip(leaves, slopes, strict=True):
                    result[name] += slope.square()
    return result


def columns_of(model: Model, logits: Tensor, batch: Batch, kind: Kind) -> Tensor:
    """Return the columns S of a batch; those of masked samples are 0."""
    if model.task.classes:
        return factor(logits, batch.y, kind) * batch.mask[:, None]
    return model.task.factor(logits, batch.y, batch.mask) * batch.mask[:, None]


def found(
    model: Model, params: Tensors, buffers: Tensors, batch: Batch, kind: Kind = "fisher"
) -> Tensors:
    """Return what `diagonal` does, from functions that can be mapped over samples."""
    whole = None if batch.x.is_floating_point() else batch.x.dtype
    plan = make_plan(model, tuple(batch.x.shape[1:]), whole)
    logits, squares = by_formulas(model, params, buffers, batch.x, plan.taps)
    columns = columns_of(model, logits, batch, kind)
    result = squares(columns)
    if plan.others:
        result |= by_sample(model, params, buffers, batch.x, columns, plan.others)
    return {name: result[name] for name in params}


def at_once(model: Model, batch_size: int, kind: Kind) -> int:
    """Return of how many samples to ask the curvature together: below twice a training step's
    memory, but not one by one.
    """
    check_alone(model)
    columns = model.num_classes if kind == "fisher" and model.num_classes > 2 else 1
    # where a step is small, so are eight samples
    return max(min(batch_size // 2, 3 * batch_size // (2 * columns)), min(8, batch_size))


def factor(logits: Tensor, y: Tensor, kind: Kind) -> Tensor:
    """Return the columns S, (C, B, K)."""
    if logits.shape[-1] == 1:
        p = torch.sigmoid(logits)
        return (
            (y[:, None] - p)[None]
            if kind == "empirical"
            else (p * torch.sigmoid(-logits)).sqrt()[None]
        )
    p = torch.softmax(logits, dim=-1)
    one = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    if kind == "empirical":
        return (one[y] - p)[None]
    if kind == "sketch":
        weight = signs(p) * p.sqrt()
        return (weight - p * weight.sum(-1, keepdim=True))[None]
    return p.mT.sqrt()[..., None] * (one[:, None] - p)


def signs(like: Tensor) -> Tensor:
    """Return 1 and −1 in the shape of `like`, (B, K): mixed bits of the place's number, the same
    every time, made where they are used.
    """
    number = torch.arange(like.shape[-2] * like.shape[-1], device=like.device).reshape(
        like.shape[-2:]
    )
    for factor, shift in ((0x045D9F3B, 16), (0x045D9F3B, 15)):
        number = ((number + 1) * factor) & 0x7FFFFFFF
        number = number ^ (number >> shift)
    return (1 - 2 * (number & 1)).to(like.dtype)


def by_sample(
    model: Model,
    params: Tensors,
    buffers: Tensors,
    x: Tensor,
    columns: Tensor,
    names: tuple[str, ...],
) -> Tensors:
    """Return h of the parameters `names` the plain way: the gradient of every column of every
    sample.
    """

    def one(x: Tensor, columns: Tensor) -> Tensors:
        def logits(some: Tensors) -> Tensor:
            return model.forward({**params, **some}, buffers, x[None], train=False)[0][0]

        _, pull = vjp(logits, {name: params[name] for name in names})  # type: ignore[misc]
        return {name: grad.square().sum(0) for name, grad in vmap(pull)(columns)[0].items()}

    return {name: value.sum(0) for name, value in vmap(one, in_dims=(0, 1))(x, columns).items()}
