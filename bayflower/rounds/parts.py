"""The parts of an update that are limited next to those of other clients, their sizes, and updates
cut down to limits.

`ServerHalf.update_fields` says what a field is:

    model, buffers     the norm of the change from what was sent
    slope, other       the norm
    factor             the norms; all fields of this kind are cut by one number (PVI)
    precision          their sum, and each number next to the one that was sent
    certainty          their sum (FedBPS: the variances)
    rows               the norm of each row (pFedVMP: the mean feature of a class)
    log_weight         the number itself (FedMAP)
    exact              nothing is cut, since the client keeps the same number (FedNP: the change of
                       its factor); far beyond the usual the whole update is refused
    claimed            limited by `claims` alone

A change that the client carries on as well (SCAFFOLD's control variate, FedDC's pace, PVI's factor)
must add up to what the clients hold. Cutting those of honest clients leaves a difference that never
goes away, so such methods have wider limits.

Where a client was not sent all of a model (`ServerHalf.sent_entries`), the entries that it was sent
and those that it keeps are two parts: what clients keep differs by far more. Entries that a client
did not send (`ServerHalf.present`) belong to no part: they are unchanged, and nothing is cut there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf
from ..stacked.shorter import shorter
from ..tree import Tensors

STEP = 1.75  # times the median norm of changes that are averaged
CARRIED = 10.0  # times the median norm of changes that the client carries on, too
FACTORS = 4.0  # the same for changes of factors, next to those of the same round
BESIDE = 2.5  # times the median norm of models that come with such changes
LEVEL = 2.0  # times the median, for counts, claims and certainties
TINY = 1e-30
RULES = ("precision", "certainty", "rows", "log_weight", "exact")
KEPT = " (kept)"  # behind the name of a field: the entries that were not sent


class Part(NamedTuple):
    """A field of stacked updates that is limited: its rule, its tensors, and what was sent."""

    name: str
    field: str
    kind: str
    leaves: Tensors  # each with one row a client
    sent: Tensors  # without that row; missing: zero
    only: Tensors = {}  # bool, one row for all or one a client: entries that count; missing: all
    beside: bool = False  # whether another field holds what the client carries on

    @property
    def rule(self) -> str:
        """Return how it is limited: step, precision, certainty, rows, log_weight or exact."""
        return self.kind if self.kind in RULES else "step"

    @property
    def factor(self) -> float:
        """Return by how much a client may exceed the median."""
        if self.rule in ("precision", "certainty"):
            return LEVEL
        if self.kind in ("slope", "factor"):
            return CARRIED if self.kind == "slope" else FACTORS
        return BESIDE if self.beside else STEP


class Limited(NamedTuple):
    """Updates within their limits, and by name the factor by which each client was reduced."""

    updates: Any
    factors: dict[str, Tensor]


def parts_of(half: ServerHalf, state: Any, updates: Any) -> list[Part]:
    """Return what is limited in stacked updates, besides counts and claims."""
    found = []
    entries, there = half.sent_entries(state), half.present(state, updates)
    beside = any(kind in ("slope", "factor", "exact") for kind in half.update_fields.values())
    for field, value in updates._asdict().items():
        kind = half.update_fields.get(field, "other")
        leaves = {
            name: leaf
            for name, leaf in named(value).items()
            if leaf.is_floating_point() and leaf.numel()
        }
        if not leaves or kind == "claimed":
            continue
        sent = sent_with(half, state, field, leaves)
        only = {name: there[full] for name in leaves if (full := flat_name(field, name)) in there}
        part = Part(field, field, kind, leaves, sent, only, beside)
        if kind == "model" and leaves.keys() <= entries.keys():
            known = {name: entries[name][None] for name in leaves}
            found.append(part._replace(only=both(known, only)))
            rest = {name: ~one for name, one in known.items()}
            part = part._replace(name=field + KEPT, only=both(rest, only))
        found.append(part)
    return found


def sent_with(half: ServerHalf, state: Any, field: str, leaves: Tensors) -> Tensors:
    """Return what was sent of a field, by name: its change starts there; {}: at zero."""
    kind = half.update_fields.get(field, "other")
    if kind not in ("model", "buffers", "precision"):
        return {}
    own = state._asdict().get(field)
    if isinstance(own, dict) and leaves.keys() <= own.keys():
        return own
    return half.shared(state) if kind == "model" else {}


def flat_name(field: str, name: str) -> str:
    """Return the name that a tensor of a field has in a flat update."""
    return f"{field}/{name}" if name else field


def both(some: Tensors, others: Tensors) -> Tensors:
    """Return the entries that count in `some` and in `others`."""
    return {name: one & others[name] if name in others else one for name, one in some.items()}


def named(value: Any) -> Tensors:
    """Return the tensors of a field by name."""
    if isinstance(value, Tensor):
        return {"": value}
    return dict(value) if isinstance(value, Mapping) else value._asdict()


def with_leaves(value: Any, leaves: Tensors) -> Any:
    """Return a field with some of its tensors replaced."""
    if isinstance(value, Tensor):
        return leaves[""]
    return {**value, **leaves} if isinstance(value, Mapping) else value._replace(**leaves)


def change(part: Part, name: str) -> Tensor:
    """Return how far a tensor of stacked updates is from what was sent, in float64; 0 where entries
    do not count.
    """
    leaf = part.leaves[name].double()
    leaf = leaf - part.sent[name].to(leaf) if name in part.sent else leaf
    return leaf * part.only[name].to(leaf) if name in part.only else leaf


def flat(part: Part) -> Tensor:
    """Return the changes of all tensors as one row a client, with the accuracy of the update: few
    operations, however many tensors there are.
    """
    names, one = sorted(part.leaves), next(iter(part.leaves.values()))
    lengths = [part.leaves[name][0].numel() for name in names]
    rows = one.new_empty(len(one), sum(lengths))
    sent = starts(part, names)
    for at, (name, place) in enumerate(zip(names, rows.split(lengths, 1), strict=True)):
        leaf = part.leaves[name].detach().reshape(len(one), -1).to(one)
        if sent:
            torch.sub(leaf, sent[at].detach().reshape(-1).to(one), out=place)
        else:
            place.copy_(leaf)
    if part.only:
        counts = [counted(part, name) for name in names]
        number = max(map(len, counts))
        counts = [one.reshape(len(one), -1).expand(number, -1) for one in counts]
        rows = torch.where(torch.cat(counts, 1), rows, torch.zeros_like(rows))
    return rows


def starts(part: Part, names: Sequence[str]) -> list[Tensor]:
    """Return what was sent of each of these tensors; []: not all were sent, changes are from 0."""
    there = bool(part.sent) and all(name in part.sent for name in names)
    return [part.sent[name] for name in names] if there else []


def counted(part: Part, name: str) -> Tensor:
    """Return which entries of a tensor count, with one row for all clients or one a client."""
    leaf = part.leaves[name]
    known = part.only.get(name)
    return torch.ones_like(leaf[:1], dtype=torch.bool) if known is None else known.to(leaf.device)


def each(scale: Tensor, like: Tensor) -> Tensor:
    """Return one number a client in a shape that multiplies `like`."""
    return scale.reshape(-1, *[1] * (like.ndim - 1))


def size_of(part: Part, rows: Tensor | None = None) -> Tensor:
    """Return the size of a part of each client, by which limits are set; `rows` is `flat`."""
    if part.rule == "log_weight":
        return next(iter(part.leaves.values())).double()
    if part.rule == "rows":
        norms = row_norms(next(iter(part.leaves.values())))
        return usual(norms.mT)
    if part.rule in ("step", "exact"):
        rows = flat(part) if rows is None else rows
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    total: Any = 0.0
    for name, leaf in part.leaves.items():
        there = leaf.double() * part.only[name].to(leaf.device) if name in part.only else leaf
        total = total + there.double().reshape(len(leaf), -1).sum(1)
    return total


def row_norms(leaf: Tensor) -> Tensor:
    """Return the norm of each row of each client (clients, rows)."""
    return leaf.double().square().sum(-1).sqrt()


def usual(values: Tensor, dim: int = 0) -> Tensor:
    """Return the median of the positive numbers in each column (or, with dim=1, each row); NaN
    where there is none.
    """
    return values.masked_fill(values <= 0, math.nan).nanmedian(dim).values


def limited(
    parts: list[Part],
    updates: Any,
    sizes: Tensors,
    limits: Tensors,
    first: bool,
    blindly: bool = False,
) -> Limited:
    """Return stacked updates within the limits. What is within them keeps its bits. In the first
    round no precision has been sent that others could be compared with. Limits are numbers on the
    CPU. `blindly`: do not look whether anything is to be cut, which would wait for a GPU.
    """
    factors: Tensors = {}
    fields: dict[str, Any] = {}
    for part in parts:
        if part.name not in limits or part.rule == "exact":
            continue
        if first and part.rule == "precision":
            part = part._replace(sent={})
        most, size = limits[part.name], sizes[part.name]
        held = fields.get(part.field, getattr(updates, part.field))
        if part.rule == "log_weight":
            factors[part.name] = (most - size).exp().clamp(max=1.0)
            fields[part.field] = torch.minimum(held, most.to(held.dtype))
        elif part.rule == "rows":
            fields[part.field], factors[part.name] = short_rows(held, most)
        else:
            scale = torch.where(size > most, most / size.clamp(min=TINY), 1.0)
            if part.kind == "factor":
                scale = together(parts, sizes, limits)
            factors[part.name] = scale
            compared = part.rule == "precision" and part.sent  # number by number
            if not (compared or blindly) and not bool((scale < 1).any()):
                continue  # the usual case: nothing to compute
            scale, now = scale.double(), named(held)
            leaves = {name: shortened(part, name, scale, now[name]) for name in part.leaves}
            fields[part.field] = with_leaves(held, leaves)
    if "num_examples" in limits:
        number = updates.num_examples
        cap = limits["num_examples"].floor().clamp(min=1, max=2**53).to(number.dtype)
        factors["num_examples"] = (cap.double() / sizes["num_examples"]).clamp(max=1.0)
        fields["num_examples"] = torch.minimum(number, cap)
    return Limited(updates._replace(**fields), factors)


def together(parts: list[Part], sizes: Tensors, limits: Tensors) -> Tensor:
    """Return each client's smallest factor over the parts of kind `factor`."""
    found = []
    for part in parts:
        if part.kind == "factor" and part.name in limits:
            size = sizes[part.name]
            most = limits[part.name]
            found.append(torch.where(size > most, most / size.clamp(min=TINY), 1.0))
    return torch.stack(found).amin(0)


def short_rows(held: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of at most the norm `most`, and each client's smallest factor."""
    norms = row_norms(held)
    scale = torch.where(norms > most, most / norms.clamp(min=TINY), 1.0)
    short = (held.double() * scale[..., None]).to(held.dtype)
    least = scale.amin(1) if scale.shape[1] else scale.new_ones(len(scale))
    return torch.where((scale < 1)[..., None], short, held), least


def shortened(part: Part, name: str, scale: Tensor, now: Tensor) -> Tensor:
    """Return a tensor of stacked updates with its change, or all of it, multiplied by the clients'
    scale, in float64; entries that do not count are as they are `now`.
    """
    leaf = part.leaves[name]
    by = each(scale, leaf)
    if part.rule in ("precision", "certainty"):
        new = torch.where(by < 1, (leaf.double() * by).to(leaf.dtype), leaf)
        if name in part.sent:
            most = (part.sent[name].double() * LEVEL).to(leaf)
            new = torch.minimum(new, most)
        return torch.where(counted(part, name), new, now) if name in part.only else new
    if leaf.is_cuda:
        step = shorter(leaf, part.sent.get(name), scale)
        if name not in part.only:
            return step
    else:
        step = change(part, name) * by
        if name in part.sent:
            step = step + part.sent[name].to(step)
    counts = by < 1
    if name in part.only:
        counts = counts & counted(part, name)
    return torch.where(counts, step.to(leaf.dtype), now)
