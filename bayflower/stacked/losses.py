"""−log p of stacks of clients in two GPU kernels: torch takes some twenty small ones under vmap,
more than the network itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .batched import front, fronts, has_kernels, on_stacks


class NegativeLogProbability(Function):
    """−log softmax(logits)_y of each sample: logits (B, C), y (B,) → (B,)."""

    @staticmethod
    def forward(logits: Tensor, y: Tensor) -> Tensor:
        return values(logits, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        logits, y = ctx.saved_tensors
        return Slope.apply(logits, y, g), None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], logits: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return on_stacks(
            values, (front(logits, dims[0], info.batch_size), front(y, dims[1], info.batch_size))
        ), 0


class Slope(Function):
    """g·(softmax(logits) − 1_y): the gradient of the above, itself differentiable."""

    @staticmethod
    def forward(logits: Tensor, y: Tensor, g: Tensor) -> Tensor:
        return slopes(logits, y, g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        logits, y, g = ctx.saved_tensors
        p = torch.softmax(logits, -1)
        along = (p * v).sum(-1, keepdim=True)
        return (
            g[..., None] * p * (v - along),
            None,
            along[..., 0] - v.gather(-1, y[..., None])[..., 0],
        )

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], logits: Tensor, y: Tensor, g: Tensor
    ) -> tuple[Tensor, int]:
        return on_stacks(slopes, fronts((logits, y, g), dims, info)), 0


class MeanNegativeLogProbability(Function):
    """The mean of −log softmax(logits)_y over the samples that count: logits (B, C), y (B,), mask
    (B,) → ().
    """

    @staticmethod
    def forward(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return means(logits, y, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return MeanSlope.apply(*ctx.saved_tensors, g), None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], logits: Tensor, y: Tensor, mask: Tensor
    ) -> tuple[Tensor, int]:
        return on_stacks(means, fronts((logits, y, mask), dims, info)), 0


class MeanSlope(Function):
    """w·(softmax(logits) − 1_y), w = mask·g / Σ mask: the gradient of the above, itself
    differentiable.
    """

    @staticmethod
    def forward(logits: Tensor, y: Tensor, mask: Tensor, g: Tensor) -> Tensor:
        return mean_slopes(logits, y, mask, g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        logits, y, mask, g = ctx.saved_tensors
        share = mask / mask.sum().clamp(min=1)
        p = torch.softmax(logits, -1)
        along = (p * v).sum(-1, keepdim=True)
        each = along[..., 0] - v.gather(-1, y[..., None])[..., 0]
        return (share * g)[..., None] * p * (v - along), None, None, (share * each).sum(-1)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        return on_stacks(mean_slopes, fronts(inputs, dims, info)), 0


class Pull(Function):
    """start plus the mean, over the samples that count, of strength_y · mean_j (z_j − centre_yj)²,
    and the gradient with respect to z.

    z (B, D), centres (K, D), strength (K,), y and mask (B,), start () → (), (B, D). Constant in all
    but z and start; the gradient is not to be differentiated.
    """

    @staticmethod
    def forward(
        z: Tensor, centres: Tensor, strength: Tensor, y: Tensor, mask: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = (z, centres, strength, y, mask, start)
        loss, slope = pulls(*(tensor[None] for tensor in inputs))
        return loss[0], slope[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Any, ...]:
        return (None if g is None else g * ctx.saved_tensors[0], None, None, None, None, g)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], *inputs: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return on_stacks(pulls, fronts(inputs, dims, info)), (0, 0)


def pull(
    z: Tensor, centres: Tensor, strength: Tensor, y: Tensor, mask: Tensor, start: Tensor
) -> Tensor:
    """Return start plus the mean, over the samples that count, of strength_y · mean_j (z_j −
    centre_yj)²; start if there is none.
    """
    loss, _ = Pull.apply(z, centres, strength, y, mask, start)
    return loss  # type: ignore[no-any-return]


def mean_nll(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of −log p(y) over the samples that count; 0 if there is none."""
    return MeanNegativeLogProbability.apply(logits, y, mask)  # type: ignore[no-any-return]


def nll(logits: Tensor, y: Tensor) -> Tensor:
    """Return −log p(y) of each sample, (B,)."""
    return NegativeLogProbability.apply(logits, y)  # type: ignore[no-any-return]


def values(logits: Tensor, y: Tensor) -> Tensor:
    """Return −log p(y) for logits (…, C), y (…)."""
    if has_kernels(logits):
        from . import losskernels

        return losskernels.nll(logits, y)
    return torch.logsumexp(logits, -1) - logits.gather(-1, y[..., None])[..., 0]


def slopes(logits: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Return g·(softmax(logits) − 1_y)."""
    if has_kernels(logits):
        from . import losskernels

        return losskernels.nll_slope(logits, y, g)
    hot = torch.zeros_like(logits).scatter(-1, y[..., None], 1.0)
    return g[..., None] * (torch.softmax(logits, -1) - hot)


def means(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of −log p(y) where the mask is 1, for logits (…, B, C), y and mask (…, B)."""
    if has_kernels(logits):
        from . import losskernels

        return losskernels.mean_nll(logits, y, mask)
    return (values(logits, y) * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def mean_slopes(logits: Tensor, y: Tensor, mask: Tensor, g: Tensor) -> Tensor:
    """Return w·(softmax(logits) − 1_y), w = mask·g / Σ mask, for logits (…, B, C), y and mask (…,
    B), g (…).
    """
    if has_kernels(logits):
        from . import losskernels

        return losskernels.mean_nll_slope(logits, y, mask, g)
    return slopes(logits, y, mask * (g / mask.sum(-1).clamp(min=1))[..., None])


def pulls(
    z: Tensor, centres: Tensor, strength: Tensor, y: Tensor, mask: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (start plus the mean of strength_y · mean_j (z_j − centre_yj)² (A,), its gradient (A,
    B, D)), with A in front of every tensor.
    """
    if has_kernels(z):
        from . import losskernels

        return losskernels.pull(z, centres, strength, y, mask, start)
    client = torch.arange(len(z), device=z.device)[:, None]
    weight = strength[client, y] * mask / mask.sum(-1, keepdim=True).clamp(min=1)
    distance = z - centres[client, y]
    loss = (weight * distance.square().mean(-1)).sum(-1)
    return start + loss, distance * (weight * (2 / z.shape[-1]))[..., None]
