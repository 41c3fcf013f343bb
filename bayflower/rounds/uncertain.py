"""The uncertainty of one client's personal model, in four steps that every engine takes.

1. `fit`: a pass over the training data gives the posteriors of the model (`maths/laplace.py`).
2. `hold`: a pass over the held-out samples gives their table of NLL. With its own table and
   everyone's a client chooses posterior, scale and affine scaling (`decide`).
3. `score`: another pass gives the histogram of the calibrated scores, for prediction sets, and of
   right and wrong predictions by doubt. The latter are of models calibrated without the sample's
   fold, so that they may decide which doubt finds errors better.
4. `judge`: the client is tested as a point, with its Laplace posterior as it was fitted, with the
   method's own posterior if it has one, with what passed the gate, and calibrated.

Tables and histograms are whole numbers that add up exactly (`calibration/`); nothing else of the
held-out samples leaves a client. Everything but `decide` runs under `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import metrics
from ..calibration import conformal, curves, trust
from ..contract import ClientHalf
from ..maths import laplace
from ..networks.last import forward_last, last_layer
from ..networks.model import Batch
from ..tree import Tensors, map_tree, take, to
from .deciding import (
    ALARMS,
    Choice,
    Held,
    Scored,
    decide,
    decide_folds,
    folded,
    nothing_held,
    thresholds,
    with_sets,
)
from .solo import numbers as numbers
from .solo import personal_model

PIECE = 128  # samples in one pass
Nothing = dict[str, Tensor]  # {}: a tree without leaves, which stacks as any other
FORMS = ("point", "fitted", "own", "posterior", "calibrated")


class Labels(NamedTuple):
    """What training samples say of the classes: how many there are, and what was predicted."""

    classes: Tensor  # (K,)
    predicted: Tensor  # (K,) Σ p


class Fitted(NamedTuple):
    """A personal model with its posteriors."""

    params: Tensors
    buffers: Tensors
    posteriors: dict[str, Tensors]
    classes: laplace.Classes | Nothing  # of the client's own training features
    bias: Tensor  # (K,), see calibration/curves.py
    mean: Tensor  # (K,) the logarithm of the mean prediction
    floor: Tensor  # share of even probabilities


class Judged(NamedTuple):
    """Tallies on test samples by form, and how many samples raised each alarm."""

    tallies: dict[str, metrics.Tally]
    trusts: dict[str, trust.Trust]
    alarms: Tensors


class Outputs(NamedTuple):
    """What a model says of some samples: logits, offsets of the logits by posterior, distance."""

    logits: Tensor
    offsets: Tensors
    distance: Tensor


class Uncertain:
    """The uncertainty of personal models of one method and network; it holds no client's numbers.

    `kinds` names the posteriors, each with its kind and origin; it is known after the first `fit`.
    """

    def __init__(self, half: ClientHalf, by_class: bool) -> None:
        self.half, self.model, self.by_class = half, personal_model(half), by_class
        self.layer = last_layer(self.model)
        self.kinds: dict[str, tuple[str, str]] = {}

    # -- 1: posteriors -----------------------------------------------------------------------------
    def numbers(self, state: Any, broadcast: Any, x: Tensor) -> tuple[Tensors, Tensors]:
        """Return (parameters, buffers) of the personal model, from one sample's prediction; beside
        the parameters their spreads, where the state holds them.
        """
        params, buffers = numbers(self.half, state, broadcast, x)
        spread = self.half.spread(state, broadcast)
        return {
            **params,
            **{laplace.SPREAD + name: value for name, value in spread.items()},
        }, buffers

    def see(
        self, params: Tensors, buffers: Tensors, batch: Batch
    ) -> tuple[Labels, laplace.Seen | Nothing]:
        """Return what a batch of training samples shows of the classes and of the last layer; {}
        if the logits are not a Linear layer's output.
        """
        params = weights(params)
        logits, features = forward_last(self.model, params, buffers, batch.x, self.layer)
        probs = curves.log_softmax(logits.double()).exp() * batch.mask.double()[:, None]
        classes = torch.arange(self.model.num_classes, device=batch.y.device)
        counts = ((batch.y[:, None] == classes) * batch.mask.double()[:, None]).sum(0)
        labels = Labels(counts, probs.sum(0))
        if self.layer is None or features is None:
            return labels, {}
        return labels, laplace.see(
            logits, features, laplace.with_bias(features, params, self.layer), batch, len(classes)
        )

    def fit(
        self,
        params: Tensors,
        buffers: Tensors,
        broadcast: Any,
        labels: Labels,
        seen: laplace.Seen | Nothing,
        rows: Tensor,
    ) -> Fitted:
        """Return the model with its posteriors, in float64; `rows` is the number of held-out
        samples.
        """
        known = seen if isinstance(seen, laplace.Seen) else None
        found = self.half.posterior(params, broadcast, known, self.layer)
        self.kinds = {name: (one.kind, one.origin) for name, one in found.items()}
        tensors = {name: one.tensors for name, one in found.items()}
        classes: laplace.Classes | Nothing = {}
        if known is not None:
            classes = laplace.class_gaussians(known)
        bias, mean = curves.bias_of(*labels), curves.mean_of(labels.predicted)
        return Fitted(weights(params), buffers, tensors, classes, bias, mean, curves.floor_of(rows))

    def outputs(self, fitted: Fitted, x: Tensor) -> Outputs:
        """Return what the model says of some samples."""
        params, buffers = fitted.params, fitted.buffers
        logits, features = forward_last(self.model, params, buffers, x, self.layer)
        wide, offsets = features, {}
        if features is not None and self.layer is not None:
            wide = laplace.with_bias(features, params, self.layer)
        for name, tensors in fitted.posteriors.items():
            kind, drawn = self.kinds[name][0], None
            if kind == "sampled":
                drawn = laplace.sampled_logits(self.model, params, buffers, x, tensors)
            offsets[name] = laplace.offsets(kind, tensors, logits, wide, drawn)
        if features is not None and isinstance(fitted.classes, laplace.Classes):
            far = laplace.distance(features, fitted.classes)
        else:
            far = torch.zeros_like(logits[..., 0], dtype=torch.float64)
        return Outputs(logits, offsets, far)

    # -- 2: held-out samples -----------------------------------------------------------------------
    def hold(self, fitted: Fitted, batch: Batch) -> Held:
        """Return what a batch of held-out samples adds, by fold; no scores yet."""
        out = self.outputs(fitted, batch.x)
        scaling = (fitted.bias, fitted.mean, fitted.floor)
        blank = self.nothing_held(batch.y.device)
        return Held(
            curves.by_fold((batch.mask != 0).long()),
            *curves.tables(out.logits, out.offsets, *scaling, batch.y, batch.mask),
            blank.scores,
            blank.doubts,
        )

    def score(self, fitted: Fitted, choice: Choice, others: Choice, batch: Batch) -> Scored:
        """Return the histograms of a batch of held-out samples; `others` are the choices without
        each fold.
        """
        out, y, mask = self.outputs(fitted, batch.x), batch.y, batch.mask
        shown = self.calibrated(fitted, choice, out)
        fresh = [self.calibrated(fitted, take(others, f), out) for f in range(curves.FOLDS)]
        fold = curves.fold_of(len(y), y.device).reshape(1, -1, 1).expand(1, *shown.shape)
        each = torch.stack(fresh).gather(0, fold)[0]
        return Scored(
            conformal.histogram(shown, y, mask, self.by_class),
            trust.doubts(each, plain_doubt(out), y, mask),
        )

    def calibrated(self, fitted: Fitted, choice: Choice, out: Outputs) -> Tensor:
        """Return the calibrated log-probabilities."""
        gated = curves.predictive(out.logits, mixed(out, choice.scales))
        return curves.doubtful(curves.scaled(gated, *affine(fitted, choice)), fitted.floor)

    def nothing_held(self, device: torch.device | str = "cpu") -> Held:
        """Return what no samples say; known after the first `fit`."""
        return nothing_held(len(self.kinds), self.model.num_classes, self.by_class, device)

    # -- 3: the choice and the test ----------------------------------------------------------------
    def measures(self, fitted: Fitted, choice: Choice, batch: Batch) -> Tensor:
        """Return the measures of ALARMS of each sample (N, 3)."""
        out = self.outputs(fitted, batch.x)
        return torch.stack(
            [*doubts(out.logits, mixed(out, choice.scales), *affine(fitted, choice)), out.distance],
            -1,
        )

    def judge(self, fitted: Fitted, choice: Choice, batch: Batch) -> Judged:
        """Return the tallies of a batch of test samples."""
        out, y, mask = self.outputs(fitted, batch.x), batch.y, batch.mask
        point = curves.log_softmax(out.logits.double())
        forms = {"point": point}
        if "laplace" in out.offsets:
            forms["fitted"] = curves.predictive(out.logits, out.offsets["laplace"])
        if "own" in out.offsets:
            forms["own"] = curves.predictive(out.logits, out.offsets["own"])
        offset = mixed(out, choice.scales)
        forms["posterior"] = curves.predictive(out.logits, mixed(out, choice.gate))
        forms["calibrated"] = self.calibrated(fitted, choice, out)
        inside = conformal.sets(forms["calibrated"], choice.lowest)
        entropy, information = doubts(out.logits, offset, *affine(fitted, choice))
        values = dict(zip(ALARMS, (entropy, information, out.distance), strict=True))
        return Judged(
            {name: metrics.tally(one.exp(), y, mask) for name, one in forms.items()},
            {
                name: trust.tally(one, inside, y, mask, *self.doubt_of(name, choice, out))
                for name, one in forms.items()
            },
            {
                name: ((values[name] > choice.alarms[name]) & (mask != 0)).sum()
                for name in choice.alarms
            },
        )

    def doubt_of(self, form: str, choice: Choice, out: Outputs) -> tuple[Tensor, ...]:
        """Return the network's own doubt, and whether it is in use; nothing but for calibrated."""
        return (plain_doubt(out), choice.plain) if form == "calibrated" else ()


def weights(params: Tensors) -> Tensors:
    """Return the parameters without their spreads."""
    return {name: value for name, value in params.items() if not name.startswith(laplace.SPREAD)}


def plain_doubt(out: Outputs) -> Tensor:
    """Return one minus the largest probability of the network itself (N,)."""
    return 1 - torch.nan_to_num(curves.log_softmax(out.logits.double()).exp()).amax(-1)


def mixed(out: Outputs, scales: Tensors) -> Tensor:
    """Return the offsets of a posterior at its scale, zero for the point."""
    total = torch.zeros_like(out.logits, dtype=torch.float64)[None]
    for name, offset in out.offsets.items():
        repeats = laplace.DRAWS // offset.shape[0]
        wide = offset.repeat_interleave(repeats, 0) if repeats > 1 else offset
        total = total + scales[name] * wide
    return total


def affine(fitted: Fitted, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return (temperature, bias) of a client's affine scaling."""
    heat = choice.temperature
    return heat, curves.offset_of(heat, choice.rest, choice.share, fitted.bias, fitted.mean)


def doubts(
    logits: Tensor, offsets: Tensor, temperature: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (entropy of the calibrated predictive, the part of it due to uncertain weights)."""
    each = curves.scaled(curves.log_softmax(logits.double() + offsets), temperature, bias)
    mean = each.logsumexp(0) - np.log(each.shape[0])
    inside = -(each.exp() * each).sum(-1).mean(0)
    shown = curves.scaled(curves.predictive(logits, offsets), temperature, bias)
    entropy = -(shown.exp() * shown).sum(-1)
    return entropy, (-(mean.exp() * mean).sum(-1) - inside).clamp(min=0)


def added(parts: list[Any]) -> Any:
    """Return the sum of trees."""
    total = parts[0]
    for part in parts[1:]:
        total = map_tree(torch.add, total, part)
    return total


def pieces(data: Batch) -> list[Batch]:
    """Return the samples in pieces of one pass; one empty piece if there are none."""
    starts = range(0, max(len(data.y), 1), PIECE)
    return [Batch(*(tensor[start : start + PIECE] for tensor in data)) for start in starts]


def over(data: Batch, fn: Callable[[Batch], Any]) -> Any:
    """Return the sum of fn over the pieces of one client's samples."""
    with torch.no_grad():
        return added([fn(part) for part in pieces(data)])


def fit_alone(uncertain: Uncertain, state: Any, broadcast: Any, train: Batch, rows: int) -> Fitted:
    """Return one client's model with its posteriors; `rows` is the number of its held-out
    samples.
    """
    with torch.no_grad():
        params, buffers = uncertain.numbers(state, broadcast, train.x[:1])
        labels, seen = added([uncertain.see(params, buffers, part) for part in pieces(train)])
        number = torch.tensor(rows, device=train.y.device)
        return uncertain.fit(params, buffers, broadcast, labels, seen, number)


def hold_alone(uncertain: Uncertain, fitted: Fitted, held: Batch | None) -> Held:
    """Return the table of one client's held-out samples, by fold."""
    if held is None:
        return folded(uncertain.nothing_held())
    found: Held = over(held, partial(uncertain.hold, fitted))
    return to(found, "cpu")


def score_alone(
    uncertain: Uncertain, fitted: Fitted, own: Held, total: Held, held: Batch | None, how: str
) -> Held:
    """Return the table and the histograms of one client's held-out samples."""
    if held is None:
        return own
    names = tuple(uncertain.kinds)
    there = to(decide(own, total, names, how)[1], held.y.device)
    others = to(decide_folds(own, total, names, how), held.y.device)
    scored: Scored = over(held, partial(uncertain.score, fitted, there, others))
    return own._replace(**to(scored, "cpu")._asdict())


def settled(
    uncertain: Uncertain,
    fitted: Fitted,
    own: Held,
    total: Held,
    held: Batch | None,
    how: str,
    coverage: float,
) -> tuple[curves.Chosen, Choice]:
    """Return everything that one client uses, thresholds of sets and alarms included."""
    both = decide(own, total, tuple(uncertain.kinds), how)
    chosen, choice = with_sets(both, own, total, how, coverage)
    if held is None:
        return chosen, choice
    there = to(choice, held.y.device)
    with torch.no_grad():
        found = [uncertain.measures(fitted, there, part) for part in pieces(held)]
    return chosen, choice._replace(alarms=thresholds(torch.cat(found)))


def judge_alone(
    uncertain: Uncertain, fitted: Fitted, choice: Choice, tests: Mapping[str, Batch]
) -> dict[str, Judged]:
    """Return one client's tallies on each of `tests`."""
    found = {}
    for name, data in tests.items():
        there = to(choice, data.y.device)
        one = over(data, partial(uncertain.judge, fitted, there))
        found[name] = to(one, "cpu")
    return found
