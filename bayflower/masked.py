"""BatchNorm that leaves padding out: the statistics of a padded batch are those of its real samples, exactly.

torch's own layer would count the padding, so that clients with a short last batch could not be stacked with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import BayflowerError

MASKABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_masks: list[Tensor] = []  # the mask of the batch that is passing through; a pass is one call in one thread


@contextmanager
def real_samples(mask: Tensor | None) -> Iterator[None]:
    """Say which samples (B,) of the batch inside are real."""
    if mask is None:
        yield
        return
    _masks.append(mask)
    try:
        yield
    finally:
        _masks.pop()


class MaskedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch's BatchNorm in training mode over the real samples; padding comes out as something finite."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Take any number of dimensions; the layer this one replaces has its own opinion, and torch checks it elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(x)
        if not _masks:
            raise BayflowerError("a stacked network with BatchNorm needs to know which samples are real: pass mask to Model.forward")
        shape = (-1,) + (1,) * (x.ndim - 1)
        channel = (1, -1) + (1,) * (x.ndim - 2)
        axes = [axis for axis in range(x.ndim) if axis != 1]
        weight = _masks[-1].to(x.dtype).reshape(shape)
        count = weight.sum() * (x[0, 0].numel() if x.ndim > 2 else 1)
        mean = (x * weight).sum(axes) / count
        centred = x - mean.reshape(channel)
        variance = (centred.square() * weight).sum(axes) / count
        self._remember(mean.detach(), variance.detach(), count)
        out = centred * torch.rsqrt(variance + self.eps).reshape(channel)
        return out * self.weight.reshape(channel) + self.bias.reshape(channel) if self.affine else out

    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics, the variance without bias, as torch does."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        buffers: Any = self
        rate: Any = self.momentum
        if buffers.num_batches_tracked is not None:
            buffers.num_batches_tracked.add_(1)
            if rate is None:
                rate = 1 / buffers.num_batches_tracked.to(mean.dtype)
        self.running_mean.copy_(self.running_mean + rate * (mean - self.running_mean))
        self.running_var.copy_(self.running_var + rate * (variance * count / (count - 1).clamp(min=1) - self.running_var))


def mask_norms(module: nn.Module) -> nn.Module:
    """Return the module with every BatchNorm replaced in place by one that leaves padding out."""
    for part in module.modules():
        if type(part) in MASKABLE:
            part.__class__ = MaskedBatchNorm
    return module
