"""Shifted inputs: what a model's uncertainty should notice. Images get noise, blur and a rotation;
tables get noise and missing columns.

Strengths are fixed: noise of half the samples' own spread, a 3×3 mean for blur, 30 degrees, three
of ten columns at their mean.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

NOISE, DEGREES, MISSING = 0.5, 30.0, 0.3


def kinds(x: Tensor) -> tuple[str, ...]:
    """Return the shifts that inputs of this kind have: images are (N, C, H, W), tables (N, D)."""
    if not x.is_floating_point():
        return ()
    return {4: ("noise", "blur", "rotation"), 2: ("noise", "missing")}.get(x.ndim, ())


def shifted(x: Tensor, kind: str, draw: np.random.Generator) -> Tensor:
    """Return the inputs with a shift; `draw` makes what is random."""
    if kind == "noise":
        spread = float(x.std()) if x.numel() > 1 else 1.0
        noise = torch.as_tensor(draw.standard_normal(tuple(x.shape), dtype=np.float32))
        return x + NOISE * spread * noise.to(x)
    if kind == "missing":
        gone = torch.as_tensor(draw.random(tuple(x.shape)) < MISSING, device=x.device)
        return x.masked_fill(gone, 0.0)
    if kind == "blur":
        padded = functional.pad(x, (1, 1, 1, 1), mode="replicate")
        return functional.avg_pool2d(padded, 3, stride=1)
    angle = math.radians(DEGREES)
    turn = [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    theta = torch.tensor(turn, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)
