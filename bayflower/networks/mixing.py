"""Does a sample's share in training depend on the other samples of its batch? No list of layers can
say: a network may take the mean of its batch, attend to it, or count its words. So it is tried.

The engine pads batches with rows that a mask leaves out. Here a few samples go through the network
twice, as they do in a stack, with different rows of padding behind them. For a network that treats
samples alone, or knows the mask, everything is the same to the bit: logits, gradients, buffers.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..stacked import chance
from ..stacked.masked import MASKABLE
from ..tree import Tensors
from .manner import couples
from .model import Model
from .parts import cast, persistent, plain_attributes, trainable

log = logging.getLogger("bayflower")
REAL, POOL = 2, 16  # samples of a pass, and samples among which padding is looked for
LARGE = 10_000_000  # parameters from which on float64 takes too long
NEAR = {torch.float64: 1e-6, torch.float32: 1e-4}  # differences that are rounding
NUMBER = 1e-3  # the same where batches have different sizes: their sums round differently


class Passed(NamedTuple):
    """What a training pass gave: logits of the real samples, and by name what changed."""

    logits: Tensor
    after: Tensors  # buffers after the pass
    slopes: Tensors
    changed: bool  # whether parameters were changed in place, such as a table of words
    learns: bool  # whether the logits have a gradient


def try_out(model: Model, x: Tensor) -> None:
    """Find out once how a network is used rightly, on some of the samples x, and keep it in
    `model.manner`; raise ConfigError if it cannot learn or counts its calls.
    """
    manner = model.manner
    if not manner.known:
        manner.known = True
        find_out(model, x)
    if manner.refused is not None:
        raise manner.refused


def find_out(model: Model, x: Tensor) -> None:
    """Note in `model.manner` what some of the samples x show."""
    # the networks of the papers are known
    if not len(x) or (model.recipe and ":" not in model.recipe["name"]):
        return
    kinds = (torch.float64, torch.float32)
    for dtype in kinds[model.num_parameters > LARGE :]:
        try:
            with torch.random.fork_rng(devices=[]), outside_torch():
                model.manner.refused = tried(model, x[:POOL].detach().cpu(), dtype)
            return
        except Exception:  # no batch of this size, or no such numbers; training says what is wrong
            log.debug("model %s could not be tried", model.name, exc_info=True)


def tried(model: Model, x: Tensor, dtype: torch.dtype) -> ConfigError | None:
    """Note what passes of the network in `dtype` show; return why it is refused, or None."""
    stacked, manner, near = model.for_stacks(gpu=False), model.manner, NEAR[dtype]
    stacked.bf16, stacked._fixed = False, {}
    for part in stacked.module_for(True).modules():
        if type(part) in MASKABLE:  # what comes next may change its output in place
            part.register_forward_hook(lambda layer, args, out: out.clone())
    if x.is_floating_point():
        x = x.to(dtype)
    real = x[torch.arange(REAL) % len(x)]
    usual, other = (torch.cat([real, row[None]]) for row in (x[0], unlike(x, real)))
    untouched = usual.clone()
    numbers, before = Numbers(model, stacked, dtype), plain(stacked.module_for(True))
    start = generators()
    first = passed(stacked, numbers, usual)
    if not first.learns:
        return ConfigError(
            f"the outputs of model {model.name} have no gradient, so nothing could be learned; "
            "leave detach(), .data, torch.no_grad() and numpy out of forward()"
        )
    if usual._version:  # it writes into its input; from now on it gets a copy
        manner.writes, usual = True, untouched
    manner.strays = generators() != start
    if not manner.strays and not alike(
        first.logits, logits_of(stacked, numbers, usual, True)[0], near
    ):
        for path, value in plain(stacked.module_for(True)).items():
            if value != before.get(path):
                return remembers(model, path)
        manner.strays = True
    if manner.strays:
        return None
    second = passed(stacked, numbers, other)
    alone, drawn = logits_of(stacked, numbers, real, True)
    # numbers of one's own go by the size of a batch; BatchNorm of few samples magnifies rounding
    by_number = drawn or bool(stacked.draws) or couples(model.module_for(True))
    manner.mixes = not (
        alike(first.logits, second.logits, near)
        and all_alike(first.after, second.after, near)
        and (by_number or alike(first.logits, alone, NUMBER))
    )
    manner.mixes_slopes = not all_alike(first.slopes, second.slopes, near)
    manner.changes = first.changed
    tests = [logits_of(stacked, numbers, part, False)[0] for part in (usual, other)]
    manner.writes |= bool(usual._version)
    manner.mixes_in_tests = not alike(tests[0], tests[1], near)
    return None


class Numbers:
    """The numbers that a network starts with; made anew after a pass that changed them."""

    def __init__(self, model: Model, stacked: Model, dtype: torch.dtype) -> None:
        self.make = partial(model.initial, 0, dtype)
        self.dtype, module = dtype, stacked.module_for(True)  # a copy, with the first seed
        self.params = {name: value.detach().to(dtype) for name, value in trainable(module).items()}
        kept = persistent(module).items()
        self.buffers = {name: cast(value.detach(), dtype) for name, value in kept}

    def changed(self, since: dict[str, int]) -> bool:
        """Return whether parameters were changed in place; the next pass gets them anew."""
        if self.versions() == since:
            return False
        self.params, _ = self.make()
        return True

    def versions(self) -> dict[str, int]:
        """Return how often each parameter was changed in place."""
        return {name: value._version for name, value in self.params.items()}


def passed(model: Model, numbers: Numbers, x: Tensor) -> Passed:
    """Return what a training pass of x gives, of which only the first rows are real."""
    params, since = numbers.params, numbers.versions()
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    torch.default_generator.manual_seed(0)
    with torch.enable_grad(), chance.step(0):
        found, after = model.forward(leaves, numbers.buffers, x, True, mask_of(x, numbers))
        logits = found[:REAL]
        slopes: Tensors = {}
        if learns := logits.requires_grad:
            aim = torch.linspace(-1, 2, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
            try:
                every = torch.autograd.grad(
                    (logits * aim).sum(), list(leaves.values()), allow_unused=True
                )
                slopes = {n: g for n, g in zip(leaves, every, strict=True) if g is not None}
            except RuntimeError:  # of networks that are not stacked anyway
                log.debug("model %s has no gradient here", model.name, exc_info=True)
    after = {name: value.detach() for name, value in after.items()}
    return Passed(logits.detach(), after, slopes, numbers.changed(since), learns)


def logits_of(model: Model, numbers: Numbers, x: Tensor, train: bool) -> tuple[Tensor, bool]:
    """Return (the logits of the real samples, whether torch's own generator was used)."""
    since = numbers.versions()
    torch.default_generator.manual_seed(0)
    before = torch.get_rng_state()
    with torch.no_grad(), chance.step(0):
        mask = mask_of(x, numbers) if train else None
        found, _ = model.forward(numbers.params, numbers.buffers, x, train, mask)
    numbers.changed(since)
    return found[:REAL], not torch.equal(before, torch.get_rng_state())


def mask_of(x: Tensor, numbers: Numbers) -> Tensor:
    """Return which rows of x are real."""
    return (torch.arange(len(x)) < REAL).to(numbers.dtype)


def unlike(x: Tensor, real: Tensor) -> Tensor:
    """Return a row of padding that has little of the real samples: another sample, the one with
    most new words; where there is none, numbers among those that occur.
    """
    others = x[REAL:]
    new = [int((~torch.isin(row, real)).sum()) for row in others]
    if any(new):
        return others[new.index(max(new))]
    low, high = x.amin(0), x.amax(0)
    share = torch.linspace(0, 1, low.numel()).reshape(low.shape)
    whole = (low + (share * (high - low)).round()).to(x.dtype)
    if not x.is_floating_point():
        return whole
    # whole numbers may be codes, so they stay some
    return torch.where(low == low.round(), whole, low + (share - 0.5) * (x.abs().mean() + 0.1))


def all_alike(these: Tensors, those: Tensors, near: float) -> bool:
    """Return whether tensors are the same by name but for rounding."""
    if these.keys() != those.keys():
        return False
    sizes = [size_of(value) for value in (*these.values(), *those.values())]
    if not all(map(math.isfinite, sizes)):
        return True
    largest = max(sizes, default=0.0)
    return all(alike(value, those[name], near, largest) for name, value in these.items())


def alike(one: Tensor, other: Tensor, near: float, largest: float = 0.0) -> bool:
    """Return whether numbers are the same but for rounding; numbers that are none say nothing."""
    if one.shape != other.shape:
        return False
    if one.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        one, other = one.double(), other.double()
    off, scale = size_of(one - other), max(size_of(one), 1e-3 * largest)
    return not (math.isfinite(off) and math.isfinite(scale)) or off <= near * scale


def size_of(value: Tensor) -> float:
    """Return the largest absolute number."""
    if value.is_sparse:
        value = value.coalesce().values()
    return float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 0.0


def plain(module: nn.Module) -> dict[str, object]:
    """Return numbers and sizes of collections that layers keep as plain attributes, by path."""
    found = dict[str, object]()
    for path, _, value in plain_attributes(module):
        if isinstance(value, (list, dict, set)):
            value = len(value)
        if isinstance(value, (int, float)):
            found[path] = value
    return found


def remembers(model: Model, path: str) -> ConfigError:
    """Return the refusal of a network that remembers an attribute."""
    layer, _, attribute = path.rpartition(".")
    owner = f"layer {layer!r}" if layer else f"model {model.name}"
    return ConfigError(
        f"{owner} keeps {attribute!r} from one call to the next; start it anew in forward(), or "
        "make it a registered buffer"
    )


def generators() -> tuple[object, ...]:
    """Return where the generators of Python and numpy are."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), *rest


@contextmanager
def outside_torch() -> Iterator[None]:
    """Leave the generators of Python and numpy as they were."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
