"""A hypernetwork: embedding of a client → one number for each weight of a layer. It lives on the
server; so do its gradients.

    paper      here          shape
    psi        psi           by name: three linear layers with LeakyReLU between them
    e^m        embedding     (d,)
    h_psi(e)   output        (K,): log alpha before its limits, less where it began

A client returns how far its log alpha moved; the hypernetwork takes a step by which its outputs
follow:

    psi ← psi + rate Σ_m g^m (∂h^m/∂psi)ᵀ Delta^m,      e^m ← e^m + rate (∂h^m/∂e^m)ᵀ Delta^m

which is descent on Σ_m g^m ½‖h(e^m) − (old h^m + Delta^m)‖²: products of a vector with the
Jacobian, which is never formed. Its curvature grows with K: the outputs move by J Jᵀ Delta, and a
common part of the last layer's K rows, however small, makes that hundreds of times Delta. `within`
says how much of a step to take.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional

from ..tree import Tensors
from .gradients import vjp
from .guesses import holds

SLOPE = 0.1  # of LeakyReLU below 0


def generator(*words: str | int) -> torch.Generator:
    """Return a generator seeded by these words."""
    seal = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(seal[:7], "big"))


def initial(seed: str, inputs: int, hidden: int, outputs: int, dtype: torch.dtype) -> Tensors:
    """Return psi: uniform as torch's linear layers, but the last bias is 0, which is where weight
    decay pulls it.
    """
    draw, psi = generator(seed, "psi"), {}
    for number, (before, after) in enumerate(
        ((inputs, hidden), (hidden, hidden), (hidden, outputs))
    ):
        for name, shape in (("weight", (after, before)), ("bias", (after,))):
            psi[f"{number}.{name}"] = (
                (2 * torch.rand(shape, dtype=torch.float64, generator=draw) - 1) / before**0.5
            ).to(dtype)
    psi["2.bias"] = torch.zeros_like(psi["2.bias"])
    return psi


def embedding(seed: str, client: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return the embedding e^m of a client before the first round: standard normal, the same
    whoever else takes part.
    """
    return torch.randn(
        size, dtype=torch.float64, generator=generator(seed, "embedding", client)
    ).to(dtype)


def output(psi: Tensors, embeddings: Tensor) -> Tensor:
    """Return h_psi of embeddings (…, d): (…, K)."""
    x = embeddings
    for number in range(3):
        x = functional.linear(x, psi[f"{number}.weight"], psi[f"{number}.bias"])
        x = functional.leaky_relu(x, SLOPE) if number < 2 else x
    return x


def ascent(
    psi: Tensors, embeddings: Tensor, steps: Tensor, shares: Tensor
) -> tuple[Tensors, Tensor]:
    """Return (Σ_m g^m (∂h^m/∂psi)ᵀ Delta^m, each (∂h^m/∂e^m)ᵀ Delta^m), in float64.

    `embeddings` (M, d), `steps` (M, K) the clients' Delta, `shares` (M,) their g.
    """
    wide = {name: value.double() for name, value in psi.items()}
    to_psi: Tensors = vjp(lambda some: output(some, embeddings.double()), wide)[1](
        shares.double()[:, None] * steps.double()
    )[0]
    to_embeddings: Tensor = vjp(lambda some: output(wide, some), embeddings.double())[1](
        steps.double()
    )[0]
    return to_psi, to_embeddings


def stepped(
    values: Tensors,
    upwards: Tensors,
    velocity: Tensors,
    *,
    rate: float,
    momentum: float,
    decay: float,
    clip: float,
) -> tuple[Tensors, Tensors]:
    """Return (values, velocity) after a step up: decay pulls to 0, the joint norm is cut to `clip`,
    momentum as in torch's SGD.

    `velocity` may lack names, which are at rest; without momentum there is none.
    """
    norm = torch.stack([value.double().square().sum() for value in upwards.values()]).sum().sqrt()
    scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
    after, going = {}, {}
    for name, value in values.items():
        move = scale * upwards[name].double() - decay * value.double()
        if momentum and name in velocity:
            move = momentum * velocity[name].double() + move
        after[name] = (value.double() + rate * move).to(value.dtype)
        going[name] = move.to(value.dtype)
    return after, going if momentum else {}


def within(reach: float, before: tuple[Tensors, Tensors], after: tuple[Tensors, Tensors]) -> float:
    """Return the share 1, ½, ¼, … of a step at which the outputs move by at most `reach`, root mean
    square over clients and weights.

    `before` and `after` are (psi, embeddings by client); a reach of 0 is no limit.
    """

    def outputs(share: float) -> Tensor:
        psi, own = (between(share, old, new) for old, new in zip(before, after, strict=True))
        return output(psi, torch.stack(list(own.values())))

    if not reach:
        return 1.0
    start, share = outputs(0.0), 1.0
    while share > 1e-12 and not holds((outputs(share) - start).square().mean().sqrt() <= reach):
        share /= 2
    return share


def between(share: float, before: Tensors, after: Tensors) -> Tensors:
    """Return where `share` of the step from `before` to `after` leads, in float64."""
    return {
        name: value.double() + share * (after[name].double() - value.double())
        for name, value in before.items()
    }
