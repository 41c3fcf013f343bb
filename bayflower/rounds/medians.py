"""The limits that the sizes of the last rounds' updates give: medians times a factor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..tree import Tensors
from .parts import LEVEL, usual
from .suspects import claims_of

FEW = 4  # fewer clients say nothing of what is usual


def limits_of(sizes: Mapping[str, Sequence[Tensor]], factors: Mapping[str, float]) -> Tensors:
    """Return the limits that the sizes of some rounds give, by name. Names with as many clients are
    worked on together: there are few numbers of many names.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, values in sizes.items():
        if name != "log_weight":
            groups.setdefault(tuple(map(len, values)), []).append(name)
    found: Tensors = {}
    for lengths, names in groups.items():
        rounds = [torch.stack([sizes[name][at] for name in names]) for at in range(len(lengths))]
        own = enough(torch.cat(rounds, 1), [factors.get(name, LEVEL) for name in names])
        found.update(zip(names, own.unbind(), strict=True))
    claims = sorted(filter(claims_of, found))
    few = [name for name in claims if bool(found[name].isinf())]
    if few:  # a claim that few others make is compared with all claims
        everyone = torch.cat([one for name in claims for one in sizes[name]])
        for name in few:
            found[name] = enough(everyone[None], [factors.get(name, LEVEL)])[0]
    if "log_weight" in sizes:
        found["log_weight"] = weight_limit(joined(sizes["log_weight"]))
    return {name: found[name] for name in sizes}


def weight_limit(values: Tensor) -> Tensor:
    """Return the limit of logarithms of weights; infinity where too few say something."""
    middle = values.median() + math.log(LEVEL)
    return middle if len(values) >= FEW else torch.full_like(middle, math.inf)


def enough(rows: Tensor, factors: Sequence[float]) -> Tensor:
    """Return the median of the positive numbers of each row times its factor; infinity where they
    are too few.
    """
    middle = rows.new_tensor(factors) * usual(rows, 1)
    return middle.masked_fill((rows > 0).sum(1) < FEW, math.inf)


def joined(values: Sequence[Tensor]) -> Tensor:
    """Return the numbers of some clients."""
    return values[0] if len(values) == 1 else torch.cat([*values])
