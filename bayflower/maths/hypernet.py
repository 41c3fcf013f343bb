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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..tree import Tensors
from .guesses import holds

SLOPE = 0.1  # of LeakyReLU below 0
PSI = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
OWN = "own"  # the embeddings of some clients (M, d), where they stand beside psi
NAMES = (*PSI, OWN)
Numbers = tuple[Tensor, ...]


class Pace(NamedTuple):
    """How fast psi and embeddings follow: the rate, the momentum of each, weight decay, the cap on
    a norm, and how far outputs may move.
    """

    rate: float
    momentum: float
    own_momentum: float
    decay: float
    clip: float
    reach: float


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

    `embeddings` (M, d), `steps` (M, K) the clients' Delta, `shares` (M,) their g. Backpropagation
    layer by layer: rows are weighted after it, and the outputs are not computed.
    """
    share, inputs = shares.double()[:, None], [embeddings.double()]  # of each layer
    for number in range(2):
        weight, bias = psi[f"{number}.weight"].double(), psi[f"{number}.bias"].double()
        x = functional.linear(inputs[-1], weight, bias)
        inputs.append(functional.leaky_relu(x, SLOPE))
    to_psi, back = {}, steps.double()
    for number in (2, 1, 0):
        own = share * back
        to_psi[f"{number}.weight"] = own.T @ inputs[number]
        to_psi[f"{number}.bias"] = own.sum(0)
        back = back @ psi[f"{number}.weight"].double()
        if number:
            back = torch.where(inputs[number] > 0, back, SLOPE * back)
    return {name: to_psi[name] for name in psi}, back


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

    `velocity` is {} where all are at rest; without momentum there is none.
    """
    names = list(values)
    wide, up = list(recast(values).values()), [upwards[name].double() for name in names]
    norm = torch.stack(torch._foreach_norm(up)).norm()
    move = torch._foreach_mul(up, torch.clamp(clip / (norm + 1e-6), max=1.0))
    torch._foreach_add_(move, wide, alpha=-decay)
    if momentum and velocity:
        before = recast({name: velocity[name] for name in names})
        torch._foreach_add_(move, list(before.values()), alpha=momentum)
    after = dict(zip(names, torch._foreach_add(wide, move, alpha=rate), strict=True))
    going = dict(zip(names, move, strict=True)) if momentum else {}
    return recast(after, values), recast(going, values)


def whole_step(
    before: Numbers, velocity: Numbers, moved: Tensor, share: Tensor, pace: Pace
) -> tuple[Numbers, Numbers, Tensor]:
    """Return (psi and the embeddings after a whole step, their velocity, whether the outputs move
    by at most the reach ()). It has no branch on a number, so that a GPU can record it.

    `before` and `velocity` are in the order of NAMES, the embeddings (M, d) last; 0 is at rest.
    `moved` (M, K) and `share` (M,) are Delta and g of the clients. Where there is no momentum the
    velocity stays as it was.
    """
    start, known = (dict(zip(NAMES, numbers, strict=True)) for numbers in (before, velocity))
    wide = recast(start)
    to_psi, to_own = ascent({name: wide[name] for name in PSI}, wide[OWN], moved, share)
    after: Tensors = {}
    going: Tensors = {}
    for up, momentum in ((to_psi, pace.momentum), ({OWN: to_own}, pace.own_momentum)):
        one, speed = stepped(
            {name: wide[name] for name in up},
            up,
            {name: known[name] for name in up},
            rate=pace.rate,
            momentum=momentum,
            decay=pace.decay,
            clip=pace.clip,
        )
        after |= one
        going |= speed
    after, going = recast(after, start), recast({**known, **going}, known)
    near = torch.ones((), dtype=torch.bool, device=moved.device)
    if pace.reach:
        near = is_near(pace.reach, output(wide, wide[OWN]), recast(after))
    return tuple(after[name] for name in NAMES), tuple(going[name] for name in NAMES), near


def flat_step(*given: Any) -> tuple[Numbers, Numbers, Tensor]:
    """Return what `whole_step` does of its tensors one after the other, and of the pace."""
    *numbers, moved, share, pace = given
    size = len(NAMES)
    return whole_step(tuple(numbers[:size]), tuple(numbers[size:]), moved, share, pace)


def kept(numbers: Numbers) -> Numbers:
    """Return numbers that a recording of a GPU will not overwrite."""
    if not numbers[0].is_cuda:
        return numbers
    found = tuple(torch.empty_like(one) for one in numbers)
    torch._foreach_copy_(found, numbers)
    return found


def is_near(reach: float, start: Tensor, after: Tensors) -> Tensor:
    """Return whether the outputs are at most `reach` from `start` (M, K), root mean square (), for
    psi and the embeddings of M clients in `after`.
    """
    return (output(after, after[OWN]) - start).square().mean().sqrt() <= reach


def within(reach: float, before: Tensors, after: Tensors, whole: Tensor | None = None) -> float:
    """Return the share 1, ½, ¼, … of a step at which the outputs move by at most `reach`, root mean
    square over clients and weights.

    `before` and `after` are psi and the embeddings of M clients, by NAMES; a reach of 0 is no
    limit. `whole` says whether the whole step is within it, where that is known.
    """
    if not reach:
        return 1.0
    if whole is not None and holds(whole):
        return 1.0
    wide, share = recast(before), 1.0 if whole is None else 0.5
    start = output(wide, wide[OWN])
    while share > 1e-12 and not holds(is_near(reach, start, between(share, before, after))):
        share /= 2
    return share


def between(share: float, before: Tensors, after: Tensors) -> Tensors:
    """Return where `share` of the step from `before` to `after` leads, in float64."""
    start, end = list(recast(before).values()), recast({name: after[name] for name in before})
    way = torch._foreach_sub(list(end.values()), start)
    return dict(zip(before, torch._foreach_add(start, way, alpha=share), strict=True))


def recast(values: Tensors, like: Tensors | None = None) -> Tensors:
    """Return the values in float64, or in the dtypes of `like`; a GPU converts all at once."""
    kinds = {name: like[name].dtype if like else torch.float64 for name in values}
    if all(values[name].dtype == kind for name, kind in kinds.items()):
        return values
    found = {name: torch.empty_like(values[name], dtype=kind) for name, kind in kinds.items()}
    torch._foreach_copy_(list(found.values()), list(values.values()))
    return found


def separated(rows: Tensor) -> list[Tensor]:
    """Return copies of the rows, each in memory of its own: where a number lies in memory must not
    depend on who else took part.
    """
    found = [torch.empty_like(row) for row in rows.unbind()]
    torch._foreach_copy_(found, list(rows.unbind()))
    return found
