"""One round of a client in a training loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor, nn

from ..contract import ClientHalf, Phase, Work
from ..data import batches
from ..errors import ConfigError
from ..networks.model import Batch
from ..networks.several import Layout, Parts, as_written
from ..recipes import Training
from ..recipes.step import Recipe
from ..recipes.step import of as recipe_of
from ..rounds import solo
from ..stacked import chance
from ..stacked.shaped import losing
from ..wire.protocol import reply_header
from . import client, records
from .client import Site
from .continuing import said

Loss = Callable[[Tensor, Tensor], Tensor]


class Job:
    """One round of one client for your own training loop.

    `model` is your network with the parameters the server sent, in training mode; `train` and
    `test` are your data, without what is held out for calibration. Minimise `loss(x, y)`, which
    includes the method's own terms, over `parameters()`. Then return `reply()`. A loss of your own
    goes into `loss(x, y, own)`; one that is computed on `model` lacks the method's terms.
    `training` has the strategy's settings (lr, batch_size, local_epochs), `round` the number of the
    round.
    """

    def __init__(
        self, message: Message, site: Site, split: bool = False, own: Loss | None = None
    ) -> None:
        self.message, self.site = message, site
        self.head = records.header(message, client.HEADER_KEYS)
        self.data, self.test = site.data.train, site.data.test
        self.unseen = split  # whether the loop may train on samples that were held out
        method = self.head["method"]
        half = client.make_half(method, self.head["instructions"], site.model)
        self.phase = only_phase(half, method)
        self.begun = client.begin_round(message, self.head, site)
        self.half, self.round = self.begun.half, self.begun.round
        self.training: Training = self.half.training
        self.recipe, self.own = own_loop(self.half, method), own
        self.weights = self.recipe.weights_of(self.data.y)
        self.repeated = self.begun.repeated  # the first reply, if the message is a duplicate
        state, broadcast = self.begun.state, self.begun.broadcast
        keys: dict[str, Any] = {"seed": self.begun.seed, "client": site.client}
        self.work: Work = self.half.begin(state, broadcast, self.data)
        made = site.model.module(self.work.params, self.work.buffers).train()
        self.model = as_written(made)
        there = dict(self.model.named_parameters())
        self.moving = {
            name: there[name] if name in there else nn.Parameter(value.clone())
            for name, value in self.work.params.items()
        }
        self.keys = {**keys, "round": self.round, "stage": f"train/{self.phase.name}"}
        self.steps, self.total, self.seen = 0, 0.0, 0

    @property
    def train(self) -> Batch:
        """Return the samples to train on."""
        self.unseen = False
        return self.data

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters to optimise: your network's, and those that the method adds."""
        return list(self.moving.values())

    def loss(self, x: Tensor | Parts, y: Tensor, own: Loss | None = None) -> Tensor:
        """Return the method's objective on a batch, to be minimised. Of a network with several
        inputs x is a dict or a tuple of them. `own(logits, y)` stands in for cross-entropy and
        returns one number a sample, or their mean; the method's own terms stay.
        """
        if (own := own or self.own) is not None:
            refuse_both(self.training)
        if not isinstance(x, Tensor):
            x = (self.site.model.layout or Layout.of(x)).pack(x)
        like = self.data.mask
        mask = torch.ones(len(y), dtype=like.dtype, device=like.device)
        group = Batch(x.to(mask.device), y.to(mask.device), mask)
        shapes = self.half.noise(self.phase.name, max(len(y), self.phase.batch_size))
        noise = batches.noise(
            shapes, **self.keys, step=self.steps, dtype=mask.dtype, device=mask.device
        )
        layers = chance.further_number(batches.layers_key(**self.keys), self.steps)
        with chance.step(layers), losing(own), self.recipe.losses(self.weights):
            loss, buffers = self.half.loss(dict(self.moving), self._now(), group, noise, self.phase)
        known = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in buffers.items():
                known[name].copy_(value.detach())
        self.steps, self.seen, self.total = (
            self.steps + 1,
            self.seen + len(y),
            self.total + float(loss.detach()) * len(y),
        )
        return loss

    def _now(self) -> Work:
        """Return the work with the current parameters and buffers."""
        known = dict(self.model.named_buffers())
        buffers = {name: known[name].detach().clone() for name in self.work.buffers}
        return self.work._replace(
            params={name: value.detach() for name, value in self.moving.items()}, buffers=buffers
        )

    def reply(self, train_loss: float | None = None) -> Message:
        """Save the client's state and return the reply to the server; a duplicate gets the saved
        reply.
        """
        saved = self.repeated
        if saved is None and self.unseen:
            raise ConfigError(
                "the training loop did not read job.train, so it may have trained on samples that "
                "are held out for calibration; train on job.train, let data return (train, test, "
                "calibration), or set calibration='off' on the strategy"
            )
        if saved is None:
            exact = torch.autocast(self.data.mask.device.type, enabled=False)
            with solo.one_thread(), exact:
                work = solo.surveyed(self.half, self._now(), self.data)
                done = self.half.finish(self.begun.state, work, self.data)
                state, update = (solo.detach(part) for part in done)
            mean = self.total / self.seen if self.seen else 0.0
            trained = solo.Trained(state, update, mean if train_loss is None else train_loss)
            saved = client.end_round(self.begun, self.head, self.site, trained)
        content = client.reply_records(saved, client.order_of(self.message, self.head))
        head = reply_header(
            method=self.head["method"],
            run=self.head["run"],
            round=self.round,
            client=self.site.client,
        )
        content[records.HEADER] = records.ConfigRecord({**head, **said(saved)})
        return Message(content, reply_to=self.message)


def refuse_both(training: Training) -> None:
    """Raise if the strategy changes a loss that the user replaces."""
    if training.label_smoothing or training.class_weights != "none":
        raise ConfigError(
            f"the app has a loss of its own, and the strategy class_weights="
            f"{training.class_weights} label_smoothing={training.label_smoothing:g}, which would "
            "have no effect; remove one of the two"
        )


def only_phase(half: ClientHalf, method: str) -> Phase:
    """Return the only phase of a round's training; raise if the method does more than minimise one
    loss.
    """
    phases = half.phases("train")
    if len(phases) != 1 or phases[0].batches != 1 or not half.plain_loop:
        raise ConfigError(
            f"{method} has no single loss, so it cannot be used in your own training loop; use "
            "make_client_app"
        )
    return phases[0]


def own_loop(half: ClientHalf, method: str) -> Recipe:
    """Return the recipe of a training loop of the user's own; raise if such a loop lacks a part of
    it.
    """
    recipe = recipe_of(half.training, half.model.num_classes)
    if recipe.augments:
        raise ConfigError(
            f"{method} runs in your own training loop, which augments its samples itself; remove "
            f"the augmentation from the strategy, or use make_client_app"
        )
    if recipe.scheduled:
        raise ConfigError(
            f"{method} runs in your own training loop, which sets the learning rate itself; remove "
            "the schedule from the strategy, or use make_client_app"
        )
    return recipe
