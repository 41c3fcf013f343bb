"""Laplace approximations: standard deviations of weights from a diagonal curvature and a prior."""

from __future__ import annotations

import torch
from torch import Tensor

from ..networks.model import Batch, Model
from ..tree import Tensors
from .curvature import Kind, diagonal

CHUNK = 8  # samples of one pass for curvature


def laplace(
    model: Model, params: Tensors, buffers: Tensors, data: Batch, prior: Tensor, kind: Kind
) -> Tensors:
    """Return 1/√(h + prior) by parameter; h is the diagonal curvature summed over `data`."""
    total: Tensors = {}
    with torch.no_grad():
        for start in range(0, len(data.y), CHUNK):
            part = Batch(*(tensor[start : start + CHUNK] for tensor in data))
            found = diagonal(model, params, buffers, part, kind)
            total = {name: value + total[name] if total else value for name, value in found.items()}
    return {name: (value + prior).rsqrt() for name, value in total.items()}
