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
common part of the last layer's K rows, however small, makes that hundreds of times Delta. `fitting`
says how much of a step to take.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..tree import Tensors, recast

SHARES = 20  # of a step that are looked at: 1, ½, ¼, …
MOST = 2**23  # moves that are computed at once, of all shares, clients and some weights

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
    return functional.linear(passed(psi, embeddings)[-1], psi["2.weight"], psi["2.bias"])


def passed(psi: Tensors, embeddings: Tensor) -> list[Tensor]:
    """Return what each layer of h_psi gets from embeddings (…, d)."""
    found = [embeddings]
    for number in range(2):
        x = functional.linear(found[-1], psi[f"{number}.weight"], psi[f"{number}.bias"])
        found.append(functional.leaky_relu(x, SLOPE))
    return found


def ascent(
    psi: Tensors, embeddings: Tensor, steps: Tensor, shares: Tensor
) -> tuple[Tensors, Tensor]:
    """Return (Σ_m g^m (∂h^m/∂psi)ᵀ Delta^m, each (∂h^m/∂e^m)ᵀ Delta^m), in float64.

    `embeddings` (M, d), `steps` (M, K) the clients' Delta, `shares` (M,) their g. Backpropagation
    layer by layer: rows are weighted after it, and the outputs are not computed.
    """
    wide, share = recast(psi), shares.double()[:, None]
    given = passed(wide, embeddings.double())
    to_psi, back = {}, steps.double()
    for number in (2, 1, 0):
        own = share * back
        to_psi[f"{number}.weight"] = own.T @ given[number]
        to_psi[f"{number}.bias"] = own.sum(0)
        back = back @ wide[f"{number}.weight"]
        if number:
            back = torch.where(given[number] > 0, back, SLOPE * back)
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


def limited_step(
    before: Numbers, velocity: Numbers, moved: Tensor, share: Tensor, pace: Pace
) -> tuple[Numbers, Numbers, Tensor]:
    """Return (psi and the embeddings after a step, their velocity, the share of the whole step that
    was taken (), 0 for none of those looked at, where psi and the rest are those of the whole
    step). On a GPU it has no branch on a number, so that it can be recorded.

    `before` and `velocity` are in the order of NAMES, the embeddings (M, d) last; 0 is at rest.
    `moved` (M, K) and `share` (M,) are Delta and g of the clients. Where there is no momentum the
    velocity stays as it was. It is that of the step that was taken, or the next one would make up
    for it.
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
    after = recast(after, start)
    going = recast({**known, **going}, known)
    if not pace.reach:
        return in_order(after), in_order(going), torch.ones_like(share[0])
    way = course(wide, after)
    part = fitting(pace.reach, wide, way, not moved.is_cuda)
    taken = part.where(part > 0, torch.ones_like(part))
    short = recast(along(way, wide, taken), start)
    after = {name: torch.where(taken < 1, short[name], after[name]) for name in NAMES}
    return in_order(after), tuple(going[name] * taken for name in NAMES), part


def in_order(values: Tensors) -> Numbers:
    """Return values in the order of NAMES."""
    return tuple(values[name] for name in NAMES)


def flat_step(*given: Any) -> tuple[Numbers, Numbers, Tensor]:
    """Return what `limited_step` does of its tensors one after the other, and of the pace."""
    *numbers, moved, share, pace = given
    size = len(NAMES)
    return limited_step(tuple(numbers[:size]), tuple(numbers[size:]), moved, share, pace)


def fitting(reach: float, before: Tensors, way: Tensors, waits: bool) -> Tensor:
    """Return the largest share of 1, ½, ¼, … of a step at which the outputs move by at most `reach`
    (), root mean square over clients and weights; 0 if there is none among SHARES.

    `before` are psi and the embeddings of M clients, by NAMES, and `way` their whole step, in
    float64. Whoever waits for each answer stops at the first; a GPU's host does not, and all shares
    are looked at.
    """
    start = before[OWN]
    shares = 0.5 ** torch.arange(SHARES, dtype=start.dtype, device=start.device)
    best = torch.zeros_like(shares[0])
    for part in shares.split(1 if waits else SHARES):
        near = moves(part, before, way) <= reach
        best = torch.maximum(best, part.where(near, torch.zeros_like(part)).max())
        if waits and bool(near):
            break
    return best


def moves(shares: Tensor, before: Tensors, way: Tensors) -> Tensor:
    """Return how far the outputs move at some shares of a step (S,), root mean square.

    The last layer's weights are W + share·V, so that its part of the move is
    (x − x₀) Wᵀ + share (x Vᵀ + v): two products for all shares, which read W and V once.
    """
    each = shares[:, None, None]
    x = before[OWN] + each * way[OWN]
    for number in range(2):
        weight, bias = (f"{number}.weight", f"{number}.bias")
        now = torch.baddbmm(
            before[bias] + each * way[bias], x, (before[weight] + each * way[weight]).mT
        )
        x = functional.leaky_relu(now, SLOPE)
    # a row of each share and client
    changed = (x - passed(before, before[OWN])[-1]).flatten(0, 1)
    part = (each * x).flatten(0, 1)
    each = each.expand(*x.shape[:2], 1).flatten(0, 1)
    last = before["2.weight"], way["2.weight"], way["2.bias"]
    some, squares = max(1, MOST // len(part)), torch.zeros_like(part[:, 0])
    for weight, wide, bias in zip(*(one.split(some) for one in last), strict=True):
        moved = torch.addmm(changed @ weight.T, part, wide.T).addcmul_(each, bias)
        squares += moved.square().sum(1)
    return (squares.reshape(len(shares), -1).mean(1) / len(way["2.bias"])).sqrt()


def within(reach: float, before: Tensors, after: Tensors) -> float:
    """Return what `fitting` does of smaller shares, one after the other."""
    start, share = recast(before), 0.5**SHARES
    way, here = course(start, after), start[OWN]
    while share > 1e-12 and not bool(moves(here.new_tensor([share]), start, way) <= reach):
        share /= 2
    return share


def course(before: Tensors, after: Tensors) -> Tensors:
    """Return the whole step to `after` from `before`, which is in float64."""
    end = recast({name: after[name] for name in before})
    moved = torch._foreach_sub(list(end.values()), list(before.values()))
    return dict(zip(before, moved, strict=True))


def along(way: Tensors, before: Tensors, share: float | Tensor) -> Tensors:
    """Return where a share of the step `way` leads from `before`, in float64."""
    part = torch._foreach_mul(list(way.values()), share)
    torch._foreach_add_(part, list(before.values()))
    return dict(zip(way, part, strict=True))


def between(share: float | Tensor, before: Tensors, after: Tensors) -> Tensors:
    """Return where `share` of the step from `before` to `after` leads, in float64."""
    start = recast(before)
    return along(course(start, after), start, share)


def separated(rows: Tensor) -> list[Tensor]:
    """Return copies of the rows, each in memory of its own: where a number lies in memory must not
    depend on who else took part.
    """
    found = [torch.empty_like(row) for row in rows.unbind()]
    torch._foreach_copy_(found, list(rows.unbind()))
    return found
