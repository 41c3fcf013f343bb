"""A client half whose training hides each sample (dp=sample): the gradient of every sample is cut,
and their sum gets noise (Abadi et al. 2016, CCS: DP-SGD).

    C       sample_clip     norm to which the gradient of one sample is cut
    z       sample_noise    standard deviation of the noise, in units of C
    B       batch_size      fixed, also where a batch has fewer samples

    g = (Σ_i g_i min(1, C/‖g_i‖) + z C ξ) / B,   ξ ~ N(0, 1) in every coordinate           [eq. 1]

Every epoch a sample is in exactly one batch. Batches are no secret, so an epoch costs as much as
one noisy sum with noise z, and sampling of batches hides nothing. What a client sends is computed
from its parameters alone, so it costs nothing more.

The keys of the noise are the operating system's (`data/batches.py`), not those of the run's seed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..contract import ClientHalf, Phase, Work
from ..data.batches import SECRET
from ..errors import ConfigError
from ..maths.gradients import are_plain, grad_and_value
from ..networks.model import Batch, Model
from ..tree import Tensors, stack


@lru_cache(maxsize=64)
def sample_private(kind: type[ClientHalf]) -> type[ClientHalf]:
    """Return the half `kind` with noisy steps in the phases of a round."""

    class PerSample(kind):  # type: ignore[valid-type, misc]
        def __init__(self, config: Any, training: Any, model: Model) -> None:
            super().__init__(config, training, model)
            if model.coupled:
                raise ConfigError(
                    "dp=sample needs gradients of single samples, but a layer of this network "
                    "looks at all samples of a batch; use a network without BatchNorm and the like"
                )

        @property
        def plain_loop(self) -> bool:
            return False

        def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
            found = dict(super().noise(stage, batch_size))
            for phase in self.phases("train"):
                if phase.name == stage:
                    shapes = self.model.shapes
                    names = shapes if phase.trainable is None else phase.trainable
                    found |= {SECRET + name: tuple(shapes[name]) for name in names}
            return found

        def gradient(
            self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
        ) -> tuple[Tensors, Tensors, Tensor]:
            """Return the noisy mean of the samples' cut gradients [eq. 1]."""
            secret = {name: value for name, value in noise.items() if name.startswith(SECRET)}
            if not secret:
                return super().gradient(phase, work, batches, noise)
            others = {name: value for name, value in noise.items() if name not in secret}
            moving = {name: work.params[name] for name in phase.moving(work.params)}
            batch, clip = batches[0], self.training.sample_clip

            def one(x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensors, Tensor]:
                def objective(moving: Tensors) -> Tensor:
                    single = Batch(x[None], y[None], torch.ones_like(mask)[None])
                    return self.loss({**work.params, **moving}, work, single, others, phase)[0]

                grads, loss = grad_and_value(objective)(moving)
                norm = sum(value.square().sum() for value in grads.values()).sqrt()
                scale = mask * clip / norm.clamp(min=clip)
                return {name: value * scale for name, value in grads.items()}, loss * mask

            if are_plain():
                grads, losses = stack([one(*row) for row in zip(*batch, strict=True)])
            else:
                grads, losses = vmap(one)(batch.x, batch.y, batch.mask)
            width = clip * self.training.sample_noise
            found = {
                name: (value.sum(0) + width * secret[SECRET + name]) / phase.batch_size
                for name, value in grads.items()
            }
            return found, work.buffers, losses.sum() / batch.mask.sum().clamp(min=1)

    PerSample.__name__ = PerSample.__qualname__ = kind.__name__
    PerSample.__module__ = kind.__module__
    return PerSample
