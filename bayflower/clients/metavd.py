"""MetaVD, client half (Jeon et al. 2023, NeurIPS): local training of weights and dropout, by any of
four bases.

    paper        here                          shape
    theta        work.params                   by name
    log alpha    memo.log_alpha + params[STEP] shape of the layer: the server's, and how far it
                 moved
    Delta^m      update.log_alpha_step         shape of the layer
    beta         memo.kl_weight                ()
    K            weights of the layer          ()

    L = mean_i −log p(y_i|x_i, w) + beta (1/K) Σ_k ½ log(1 + 1/alpha_k),                [eq. 4]
    w_k ~ N(theta_k, alpha_k theta_k²)

Of the layer's outputs, not its weights, one draw is taken a sample: mean x thetaᵀ + b, variance x²
(alpha theta²)ᵀ. The bases: fedavg and reptile descend [eq. 4]; maml and perfedavg what is left of
it after an inner step on theta, alpha fixed. Before a test all but fedavg take a step on theta;
then the weights are at their mean. The view `sampled` averages over draws of the weights.

Departs:
  E-V4  the algorithm subtracts the gradient of the bound that the text maximises; here the negative
        bound is minimised.
  E-V5  gradient descent is in log alpha, which is cut to ±8.5.
  E-V6  the KL is the mean over the weights (the printed sum is a thousand times the likelihood);
        theta is not in it.
  E-V7  the KL itself is right; nothing but the likelihood keeps alpha from growing.
  E-V9  `sampled` is tested with both ECEs like every view.
  E-V10 dropped weights are 0, do not move, and are not sent. `alpha_rate` scales the gradient of
  log alpha: a mean over K weights gives each of them little.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..contract import Phase, Posterior, Purpose, Work
from ..errors import ConfigError
from ..maths import dropout
from ..maths.laplace import Seen
from ..networks.model import Batch, Model
from ..stacked import spreads
from ..strategies.metavd import MASK, STEP, Broadcast, Update
from ..tree import Shapes, Tensors, map_tree, shapes, unflatten
from .addon import LOCAL, TWO, AddOn
from .fedavg import State, count


class Memo(NamedTuple):
    """What is constant during a round."""

    log_alpha: Tensor
    kl_weight: Tensor
    mask: Tensors


class Client(AddOn):
    """Trains weights and their dropout from what the server sent."""

    update_type: ClassVar[type] = Update
    sized_by = ("mask",)

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        kinds = {name: type(part) for name, part in model.module_for(True).named_modules()}
        if not issubclass(kinds.get(self.layer, type(None)), nn.Linear):
            known = [name for name, kind in kinds.items() if issubclass(kind, nn.Linear)]
            what = f"of type {kinds[self.layer].__name__}" if self.layer in kinds else "no layer"
            raise ConfigError(
                f"the dropout posterior needs a linear layer, {self.layer!r} is {what}; name one "
                f"as dropout_layer: {', '.join(known) or 'there is none'}"
            )

    def views(self) -> dict[str, str]:
        """Return the personal model and the global one; the personal one also averaged over weight
        samples, where asked for.
        """
        adapted = (
            self.phases("finetune") and f"after {self.config.adapt_steps} step(s) of adaptation, "
        )
        views = {
            "personal": f"the global model {adapted or 'with the client’s dropout, '}weights at "
            "their mean",
            "global": "the global model of the last round",
        }
        if self.config.predict_samples:
            views["sampled"] = (
                f"the personal model, averaged over {self.config.predict_samples} samples of its "
                "weights"
            )
        return views

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return one number for each of the layer's outputs in training; whole weights for a
        prediction from samples.
        """
        out, into = self.model.shapes[self.weight]
        if stage == "predict":
            return (
                {"weight": (self.config.predict_samples, out, into)}
                if self.config.predict_samples
                else {}
            )
        # a last single sample may have joined the batch
        rows = batch_size + int(self.model.coupled)
        return {
            "output": (2, rows, out) if stage == LOCAL and self.config.base in TWO else (rows, out)
        }

    def unpack(self, kind: type, flat: Tensors) -> Any:
        """Return the broadcast, dropped entries 0."""
        if self.config.drop_above:
            flat = dropout.fill(
                flat, MASK, (f"params/{self.weight}", "log_alpha"), self.model.shapes[self.weight]
            )
        return unflatten(kind, flat)

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:  # type: ignore[override]
        """Return the work that starts at the global model and the client's dropout."""
        params = {**broadcast.params, STEP: torch.zeros_like(broadcast.log_alpha)}
        return Work(
            params,
            broadcast.buffers,
            memo=Memo(broadcast.log_alpha, broadcast.kl_weight, broadcast.mask),
        )

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return [eq. 4] on one batch with one draw of the layer's outputs. The gradient of log
        alpha is multiplied by `alpha_rate`.
        """
        theta = {name: value for name, value in params.items() if name != STEP}
        step, rate, dropped = params[STEP], self.config.alpha_rate, work.memo.mask.get("layer")
        if rate != 1:
            step = spreads.scaled(step, rate)
        if dropped is not None:
            theta[self.weight] = theta[self.weight].masked_fill(dropped, 0)
        kl, variance = dropout.kl_and_variance(
            work.memo.log_alpha, step, theta[self.weight], dropped
        )

        def disturb(x: Tensor, output: Tensor) -> Tensor:
            if x.ndim != 2 or x.shape[0] != batch.x.shape[0]:
                raise ConfigError(
                    f"dropout_layer {self.layer!r} gets {tuple(x.shape)}, several rows a sample; "
                    "name a linear layer that gets one row a sample"
                )
            spread = dropout.output_variance(x, variance())
            return dropout.disturbed(output, spread, noise["output"][: len(x)])

        logits, buffers = self.model.forward_through(
            theta, work.buffers, batch.x, True, self.layer, disturb, batch.mask
        )
        nll = self.model.mean_nll(logits, batch.y, batch.mask)
        return nll + work.memo.kl_weight * kl, buffers

    def inner(self, work: Work) -> tuple[str, ...]:
        """Return theta: the inner step leaves alpha as it is."""
        return tuple(name for name in work.params if name != STEP)

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return (n, theta, Delta); Delta leads to a log alpha within its limits, and is 0 where a
        weight was dropped.
        """
        start, step = work.memo.log_alpha, work.params[STEP]
        step = torch.where(
            (start + step).abs() > dropout.LIMIT, dropout.limited(start + step) - start, step
        )
        params = {name: work.params[name] for name in self.inner(work)}
        if work.memo.mask:
            params[self.weight], step = (
                value.masked_fill(work.memo.mask["layer"], 0)
                for value in (params[self.weight], step)
            )
        return state, Update(count(data), params, work.buffers, step, work.memo.mask)

    def pack(self, update: Update) -> Tensors:
        """Return what travels of an update: of the layer only what is not dropped."""
        flat = super().pack(update)
        return dropout.thin(flat, MASK, (f"params/{self.weight}", STEP)) if update.mask else flat

    def packed_shapes(self, updates: Update) -> list[Shapes]:
        """Return the shapes of the messages of stacked updates."""
        if not updates.mask:
            return super().packed_shapes(updates)
        first, size = map_tree(lambda leaf: leaf[0], updates), updates.log_alpha_step[0].numel()
        kept = (size - updates.mask["layer"].flatten(1).sum(1)).tolist()
        short = {f"params/{self.weight}", STEP}
        whole = shapes(first)

        def thin(number: int) -> Shapes:
            bits = (MASK, (-(-size // 8),), "uint8")
            return tuple(
                bits if one[0] == MASK else (one[0], (number,), one[2]) if one[0] in short else one
                for one in whole
            )

        return [thin(int(number)) for number in kept]

    def finish_adapting(self, state: State, work: Work, data: Batch, purpose: Purpose) -> State:
        """Return the adapted model."""
        return state._replace(
            tuned={**{name: work.params[name] for name in self.inner(work)}, **work.buffers}
        )

    def predict(  # type: ignore[override]
        self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities with the weights at their mean, or averaged over samples of
        them (`sampled`).
        """
        known = (
            {**broadcast.params, **broadcast.buffers}
            if view == "global" or not state.tuned
            else state.tuned
        )
        draws = noise["weight"] if view == "sampled" else [None]
        found = []
        for draw in draws:
            params = (
                known
                if draw is None
                else {
                    **known,
                    self.weight: dropout.sampled(known[self.weight], broadcast.log_alpha, draw),
                }
            )
            found.append(
                self.model.probabilities(self.model.forward(params, {}, x, train=False)[0])
            )
        return self.model.task.mixed(torch.stack(found)) if len(found) > 1 else found[0]

    @property
    def plain_loop(self) -> bool:
        """Return whether the base trains by plain steps, dropout and weights at the same rate."""
        return super().plain_loop and self.config.alpha_rate == 1

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the method's own dropout posterior N(theta, alpha theta²) of one layer."""
        std = (broadcast.log_alpha / 2).exp() * params[self.weight].abs()
        own = Posterior("sampled", {self.weight: std}, "MetaVD's dropout posterior of one layer")
        return {**super().posterior(params, broadcast, seen, layer), "own": own}
