"""A client half with the user's own network and data: a ClientApp in one call, or two calls around
the user's own training loop.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from .. import methods
from ..config import Training, named_device
from ..contract import ClientHalf, Phase, Work
from ..data import batches
from ..data.loaders import pair
from ..errors import BayflowerError, ConfigError
from ..files.store import DiskStore
from ..networks.check import checked_model
from ..networks.model import Batch
from ..recipes.step import Recipe
from ..recipes.step import of as recipe_of
from ..rounds import solo
from ..stacked import chance
from ..tree import to
from ..wire.protocol import reply_header
from . import client, records
from .client import Site
from .holding import Rule

FEW = 8  # samples of a trial step
KEPT = 64  # clients whose data a process caches
PARTS = ("train", "test", "calibration")
SITES: dict[tuple[str, int], Loaded] = {}  # cache of loaded clients, by plug and client
LOADING = threading.Lock()


def make_client_app(
    method: str, *, model: Callable[[], nn.Module], data: Callable[[Context], Any], **options: Any
) -> ClientApp:
    """Return a Flower ClientApp that runs `method` on your network and data. `Plug` describes the
    options.
    """
    return Plug(method, model=model, data=data, **options).app()


class Plug:
    """Your network and data as a client of `method`.

    model   a function without arguments that returns a torch.nn.Module: the class, or a lambda
    data    a function from Flower's Context to (train, test) or (train, test, calibration): pairs
            (x, y) of tensors or arrays, data sets, or loaders. Without a third part, a share of
            train is held out if the strategy's calibration is not off
    head    the name of the classifier's layer, or a list of prefixes of names; by default the
            attribute called head, else the last Linear
    layer   MetaVD and SNIP: the linear layer that the strategy's dropout_layer will name
    state   folder for the client's state; by default state-dir of the node's configuration, else
            bayflower-runs/state in the home folder
    device  cpu, cuda or cuda:N; auto = a GPU if there is one
    mods    Flower mods around training, such as its clipping
    export  further formats of the personal model after the last round, besides safetensors: pt2,
            onnx
    """

    def __init__(
        self,
        method: str,
        *,
        model: Callable[[], nn.Module],
        data: Callable[[Context], Any],
        head: str | Sequence[str] | None = None,
        layer: str = "",
        state: Path | str | None = None,
        device: str = "auto",
        export: Sequence[str] = ("pt2",),
        mods: Sequence[Any] = (),
    ) -> None:
        self.row = methods.get(method)
        self.model, self.data, self.head, self.layer, self.state, self.device = (
            model,
            data,
            head,
            layer,
            state,
            device,
        )
        self.export, self.mods = tuple(export), list(mods)
        if unknown := sorted(set(export) - {"pt2", "onnx"}):
            raise ConfigError(f"export must name pt2 or onnx, got {unknown[0]!r}")
        # A simulation copies this object for every message. The copies share the cache by name.
        self.name = uuid.uuid4().hex

    # -- what Flower calls ------------------------------------------------------------------------
    def app(self) -> ClientApp:
        """Return the ClientApp that answers all messages of a Bayflower strategy."""
        app = ClientApp()
        app.query()(self.query)
        app.train(mods=self.mods)(self.train)
        app.evaluate()(self.evaluate)
        return app

    def query(self, message: Message, context: Context) -> Message:
        """Return what this client reports of itself. One trial step runs first, so that an
        unsuitable network fails before training.
        """
        site = self.site(context, message)
        rehearse(self.row, site, self.layer)
        return client.client_app(lambda _: site)(message, context)

    def train(self, message: Message, context: Context) -> Message:
        """Return the reply to a round, trained with the strategy's settings."""
        self.check(message)
        return client.answer(message, self.site(context, message), client.train_reply)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Return the test of the personal model after the last round; the model is saved beside the
        client's state.
        """
        self.check(message)
        reply = partial(client.evaluate_reply, formats=self.export)
        return client.answer(message, self.site(context, message), reply)

    def begin(self, message: Message, context: Context) -> Job:
        """Return the round as a job for your own training loop; `Job.reply` ends it."""
        self.check(message)
        loaded = self.loaded(context, message)
        return Job(message, loaded.site, loaded.split)

    # -- inside -----------------------------------------------------------------------------------
    def check(self, message: Message) -> None:
        """Raise if the server runs a different method."""
        asked = str(records.header(message, ("method",))["method"])
        if methods.get(asked).stem != self.row.stem:
            raise ConfigError(
                f"this client was made for {self.row.name}, but the server runs {asked}; name the "
                "same method on both sides"
            )

    def site(self, context: Context, message: Message | None = None) -> Site:
        """Return this client with its data; what `message` says of calibration is held out."""
        return self.loaded(context, message).site

    def loaded(self, context: Context, message: Message | None) -> Loaded:
        """Return this client and how its data were split; they are cached in the process."""
        config: Mapping[str, Any] = context.node_config
        if "partition-id" not in config:
            raise ConfigError(
                "the node's configuration has no partition-id; start it with --node-config "
                "'partition-id=0 num-partitions=N'"
            )
        client = int(config["partition-id"])
        rule = Rule.read(records.header(message, ())) if message is not None else None
        with LOADING:
            known = SITES.get((self.name, client))
            if known is None or known.rule != rule:
                if known is None and len(SITES) == KEPT:
                    SITES.pop(next(iter(SITES)))
                known = SITES[self.name, client] = self.load(client, context, rule)
            return known

    def load(self, client: int, context: Context, rule: Rule | None) -> Loaded:
        """Return the client with its data on the device and its network checked."""
        parts = self.data(context)
        if not isinstance(parts, (tuple, list)) or len(parts) not in (2, 3):
            raise ConfigError(
                f"data must return (train, test) or (train, test, calibration), got "
                f"{type(parts).__name__}; e.g. return (x_train, y_train), (x_test, y_test)"
            )
        device = named_device(self.device)
        train, *others = (
            batch(part, what, device) for part, what in zip(parts, PARTS, strict=False)
        )
        for what, part in zip(PARTS[1:], others, strict=False):
            if len(part.y) and part.x.shape[1:] != train.x.shape[1:]:
                raise ConfigError(
                    f"train has samples of shape {tuple(train.x.shape[1:])}, {what} has "
                    f"{tuple(part.x.shape[1:])}; give both the same shape"
                )
        labels = torch.cat([train.y, *(part.y for part in others)])
        model = checked_model(self.model, train.x, labels, self.head)
        test, *given = others
        held = None
        if rule is not None and given:
            held = rule.capped(given[0], client)
        elif rule is not None:
            train, held = rule.split(train, client)
        root = (
            self.state
            or context.node_config.get("state-dir")
            or Path.home() / "bayflower-runs" / "state"
        )
        new = str(context.node_config.get("new-client", "false")).lower() in ("true", "1")
        site = Site(client, new, model, solo.Samples(train, test, held), DiskStore(Path(str(root))))
        return Loaded(rule, held is not None and not given, site)


class Loaded(NamedTuple):
    """A client with its data."""

    rule: Rule | None  # what the strategy said of held-out samples
    split: bool  # whether samples were taken out of the user's training part
    site: Site


class Job:
    """One round of one client for your own training loop.

    `model` is your network with the parameters the server sent, in training mode; `train` and
    `test` are your data, without what is held out for calibration. Minimise `loss(x, y)`, which
    includes the method's own terms, over `parameters()`. Then return `reply()`. A loss of your own
    on `model` lacks those terms.
    """

    def __init__(self, message: Message, site: Site, split: bool = False) -> None:
        self.message, self.site = message, site
        self.head = records.header(message, client.HEADER_KEYS)
        self.data, self.test = site.data.train, site.data.test
        self.unseen = split  # whether the loop may train on samples that were held out
        method = self.head["method"]
        half = client.make_half(method, self.head["instructions"], site.model)
        self.phase = only_phase(half, method)
        self.begun = client.begin_round(message, self.head, site)
        self.half, self.round = self.begun.half, self.begun.round
        self.recipe = own_loop(self.half, method)
        self.weights = self.recipe.weights_of(self.data.y)
        self.repeated = self.begun.repeated  # the first reply, if the message is a duplicate
        state, broadcast = self.begun.state, self.begun.broadcast
        keys: dict[str, Any] = {"seed": self.begun.seed, "client": site.client}
        self.work: Work = self.half.begin(state, broadcast, self.data)
        self.model = site.model.module(self.work.params, self.work.buffers).train()
        own = dict(self.model.named_parameters())
        self.moving = {
            name: own[name] if name in own else nn.Parameter(value.clone())
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

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the method's objective on a batch, to be minimised."""
        like = self.data.mask
        mask = torch.ones(len(y), dtype=like.dtype, device=like.device)
        group = Batch(x.to(mask.device), y.to(mask.device), mask)
        shapes = self.half.noise(self.phase.name, max(len(y), self.phase.batch_size))
        noise = batches.noise(
            shapes, **self.keys, step=self.steps, dtype=mask.dtype, device=mask.device
        )
        layers = chance.further_number(batches.layers_key(**self.keys), self.steps)
        with chance.step(layers), self.recipe.losses(self.weights):
            loss, buffers = self.half.loss(dict(self.moving), self._now(), group, noise, self.phase)
        own = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in buffers.items():
                own[name].copy_(value.detach())
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
            with solo.one_thread():
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
        content[records.HEADER] = records.ConfigRecord(head)
        return Message(content, reply_to=self.message)


def batch(source: Any, what: str, device: torch.device) -> Batch:
    """Return the user's samples as one batch on the device."""
    x, y = pair(source, what)
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return Batch(x.to(device), y.to(device), torch.ones(len(y), dtype=dtype, device=device))


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


def rehearse(row: methods.Method, site: Site, layer: str = "") -> None:
    """Try one step of a round on a few samples and discard the result; raise ConfigError if the
    method cannot train the network.
    """
    model, train = site.model, site.data.train
    names = {field.name for field in dataclasses.fields(row.config)}
    chosen = {**row.defaults, **({"dropout_layer": layer} if layer else {})}
    config = row.config(**{name: value for name, value in chosen.items() if name in names})
    training = Training()
    if row.client.needs_base and model.head_names == frozenset(model.shapes):
        raise ConfigError(
            f"the head {', '.join(model.head_layers)} is the whole network; {row.name} needs "
            "layers before it: name a smaller head"
        )
    few = Batch(*(tensor[:FEW] for tensor in train))
    initial = [
        {name: value.to(few.mask.device) for name, value in part.items()}
        for part in model.initial(0, few.mask.dtype)
    ]
    try:
        half, server = row.client(config, training, model), row.server(config, model.anatomy)
        sent = server.broadcast(server.init(initial[0], initial[1], (site.client,)), site.client)
        state = to(half.init(initial[0], initial[1]), few.mask.device)
        with solo.seeded(0, 0, 0), chance.step(0):
            work = half.begin(state, sent, few)
            for phase in half.phases("train"):
                work = solo.fresh_optimizer(phase, work)
                shapes = half.noise(phase.name, phase.batch_size).items()
                noise = {
                    name: torch.zeros(shape, dtype=few.mask.dtype, device=few.mask.device)
                    for name, shape in shapes
                }
                work, _ = half.step(phase, work, (few,) * phase.batches, noise)
            half.finish(state, solo.surveyed(half, work, few), few)
    except ConfigError:
        if "dropout_layer" in names and not layer:
            return  # the strategy may name another layer, which is checked later
        raise
    except BayflowerError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{row.name} cannot train model {model.name}: {type(error).__name__}: {reason}"
        ) from error
