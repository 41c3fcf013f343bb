"""Partial sums, limits, and what a region saw of its clients, as arrays by name and JSON.

Everything that comes from a region is checked when it is read: a region may be faulty. Nothing of a
sum is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...contract import ServerHalf
from ...errors import WireError
from ...fused.workers.cargo import Seen, seen_by
from ...maths.accumulator import HIGHEST, LOWEST, MAGIC, WIDTH
from ...maths.exact import Packed, Total
from ...rounds.gate import OWN, SIZE
from ...rounds.robust import Limiter
from ...rounds.suspects import Apart, Suspects
from ...tree import Tensors

MOST_CHUNKS = 100_000
MOST_REASONS = 16


# -- sums ------------------------------------------------------------------------------------------
def sum_out(total: Total, flat: Tensors, prefix: str) -> dict[str, Any]:
    """Put a total's arrays into `flat` under `prefix`; return the rest of it in JSON types."""
    packed = total.packed()
    for name, array in packed.integers.items():
        flat[f"{prefix}/int/{name}"] = torch.from_numpy(array)
    chunks = []
    for number, (size, limbs) in enumerate(packed.chunks):
        chunks.append([size, sorted(limbs)])
        for window, array in limbs.items():
            flat[f"{prefix}/limb/{number}/{window}"] = torch.from_numpy(array)
    shapes = {name: list(shape) for name, shape in packed.shapes.items()}
    places = {name: [list(one) for one in some] for name, some in packed.places.items()}
    return {"shapes": shapes, "chunks": chunks, "places": places}


def sum_in(told: Any, flat: Mapping[str, Tensor], prefix: str) -> Total:
    """Return the total that `sum_out` wrote; raise if it cannot be one."""
    try:
        shapes = {str(k): tuple(map(int, v)) for k, v in told["shapes"].items()}
        start = f"{prefix}/int/"
        whole = {k[len(start) :]: v.numpy() for k, v in flat.items() if k.startswith(start)}
        chunks = []
        for number, (size, windows) in enumerate(told["chunks"][:MOST_CHUNKS]):
            limbs = {int(w): flat[f"{prefix}/limb/{number}/{w}"].numpy() for w in windows}
            fits = all(
                x.dtype == np.float64 and x.shape == (size,) and LOWEST <= w <= HIGHEST
                for w, x in limbs.items()
            )
            if not fits:
                raise WireError("a partial sum has windows of another size or kind")
            if not all((np.abs(x - MAGIC) <= 2.0 ** (WIDTH - 1)).all() for x in limbs.values()):
                raise WireError("a partial sum has digits out of range")
            chunks.append((int(size), limbs))
        places = {str(k): [tuple(map(int, p)) for p in v] for k, v in told["places"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"a partial sum cannot be read ({type(error).__name__})") from None
    check_places(shapes, whole, chunks, places)
    return Total.unpacked(Packed(shapes, whole, chunks, places))


def check_places(shapes: Any, whole: Any, chunks: Any, places: Any) -> None:
    """Raise unless every element of every name is in its own place of a chunk."""
    if set(shapes) != {*whole, *places} or set(whole) & set(places):
        raise WireError("a partial sum names other numbers than it holds")
    used: dict[int, list[tuple[int, int]]] = {}
    for name, some in places.items():
        done = 0
        for chunk, at, start, size in some:
            if not (0 <= chunk < len(chunks) and start == done and size > 0 and at >= 0):
                raise WireError("a partial sum has numbers out of place")
            if at + size > chunks[chunk][0]:
                raise WireError("a partial sum has numbers out of place")
            used.setdefault(chunk, []).append((at, at + size))
            done += size
        if done != int(np.prod(shapes[name], dtype=np.int64)):
            raise WireError(f"a partial sum lacks numbers of {name[:80]!r}")
    for spans in used.values():
        spans.sort()
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            raise WireError("a partial sum has two numbers in one place")
    for name, array in whole.items():
        if array.dtype != np.int64 or array.shape != shapes[name]:
            raise WireError(f"a partial sum has whole numbers of another shape, {name[:80]!r}")


def apart_out(apart: Apart, flat: Tensors) -> list[Any]:
    """Put the sums of suspects into `flat`; return the rest in JSON types."""
    found = []
    for number, (why, (used, left)) in enumerate(apart.sums.items()):
        both = [sum_out(one, flat, f"apart/{number}/{k}") for k, one in enumerate((used, left))]
        found.append([sorted(why), both])
    return found


def apart_in(told: Any, flat: Mapping[str, Tensor], apart: Apart) -> None:
    """Add the sums of suspects that `apart_out` wrote to `apart`."""
    known = Suspects().of
    if not isinstance(told, list) or len(told) > MOST_REASONS:
        raise WireError("the sums of suspects cannot be read")
    for number, (reasons, both) in enumerate(told):
        why = frozenset(reasons)
        if not why or not why <= set(known) or len(both) != 2:
            raise WireError("the sums of suspects name an unknown reason")
        pair = apart.sums.setdefault(why, (Total(), Total()))
        for k, total in enumerate(pair):
            total.merge(sum_in(both[k], flat, f"apart/{number}/{k}"))


# -- limits ----------------------------------------------------------------------------------------
def limits_out(limiter: Limiter, clients: Collection[int], flat: Tensors) -> dict[str, Any]:
    """Put what limits some clients in this round into `flat`; return the rest in JSON types."""
    told: dict[str, Any] = {"how": limiter.how, "begun": bool(limiter.past)}
    told["names"] = sorted(limiter.limits)
    for name in limiter.limits:
        flat[f"limits/{told['names'].index(name)}"] = limiter.limits[name]
    if (gate := limiter.gate) is not None:
        told["out"] = sorted(one for one in gate.out if one in clients)
        told["steady"] = {str(one): gate.steady[one] for one in clients if one in gate.steady}
        known = [one for one in sorted(clients) if one in gate.own]
        told["own"] = known
        if known:
            flat["own"] = torch.from_numpy(np.stack([gate.own[one] for one in known]))
    return told


def limits_in(half: ServerHalf, told: Any, flat: Mapping[str, Tensor]) -> Limiter:
    """Return the limits of a round as the server has them, for the clients of a region."""
    limiter = Limiter(half, str(told["how"]))
    limiter.limits = {name: flat[f"limits/{k}"] for k, name in enumerate(told["names"])}
    if told["begun"]:
        limiter.past = {"": []}  # there were rounds; their sizes stay with the server
    if (gate := limiter.gate) is not None:
        gate.out = dict.fromkeys(told["out"], 0.0)
        gate.steady = {int(one): list(values) for one, values in told["steady"].items()}
        own = flat["own"].numpy() if told["own"] else np.zeros((0, OWN), np.int8)
        gate.own = dict(zip(told["own"], own, strict=True))
    return limiter


# -- what was seen ---------------------------------------------------------------------------------
def seen_out(limiter: Limiter, flat: Tensors) -> dict[str, Any]:
    """Put what limits saw of a region's clients into `flat`; return the rest in JSON types."""
    seen = seen_by(limiter)
    names = sorted(seen.now)
    for place, name in enumerate(names):
        flat[f"seen/{place}"] = torch.cat([one.reshape(-1) for one in seen.now[name]])
    suspects = seen.suspects
    told: dict[str, Any] = {"names": names, "factors": seen.factors}
    told["clients"] = sorted(suspects.clients)
    told["of"] = {reason: sorted(some) for reason, some in suspects.of.items()}
    told["cuts"] = [
        [list(some), {name: value.double().tolist() for name, value in cuts.items()}]
        for some, cuts in suspects.cuts
    ]
    if seen.sketches is not None:
        now, itself, turned = seen.sketches
        told["sketched"] = sorted(now)
        told["itself"] = {str(one): value for one, value in itself.items()}
        told["turned"] = {str(one): value for one, value in turned.items()}
        if now:
            flat["sketches"] = torch.from_numpy(np.stack([now[one] for one in sorted(now)]))
    return told


def seen_in(told: Any, flat: Mapping[str, Tensor], clients: Collection[int]) -> Seen:
    """Return what a region saw; raise if it speaks of other clients than its own, or nonsense."""
    try:
        now = {str(name): [flat[f"seen/{k}"]] for k, name in enumerate(told["names"])}
        suspects = Suspects()
        suspects.clients = set(map(int, told["clients"]))
        for reason in suspects.of:
            suspects.of[reason] = set(map(int, told["of"][reason]))
        suspects.cuts = [
            ([int(one) for one in some], {str(k): torch.tensor(v) for k, v in cuts.items()})
            for some, cuts in told["cuts"]
        ]
        sketches = None
        if "sketched" in told:
            rows = flat["sketches"].numpy() if told["sketched"] else np.zeros((0, SIZE))
            if rows.shape != (len(told["sketched"]), SIZE) or not np.isfinite(rows).all():
                raise WireError("a region's sketches of changes have another shape")
            now_of = {int(c): row for c, row in zip(told["sketched"], rows, strict=True)}
            others = [{int(c): float(v) for c, v in told[k].items()} for k in ("itself", "turned")]
            sketches = (now_of, *others)
        factors = {str(name): float(value) for name, value in told["factors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"what a region saw cannot be read ({type(error).__name__})") from None
    named = {*suspects.clients, *(one for some in suspects.of.values() for one in some)}
    named |= {one for some, _ in suspects.cuts for one in some}
    named |= {one for part in sketches or () for one in part}
    if not named <= set(clients):
        raise WireError("a region speaks of clients that were not asked")
    if any(value.ndim != 1 or len(value) > len(suspects.clients) for (value,) in now.values()):
        raise WireError("a region's sizes are not those of its clients")
    if any(bool(value.isnan().any()) for (value,) in now.values()):
        raise WireError("a region's sizes are not numbers")
    return Seen(now, factors, suspects, sketches)  # type: ignore[arg-type]
