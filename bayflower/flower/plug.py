"""A client half with the user's own network and data: a ClientApp in one call, or two calls around
the user's own training loop.
"""

from __future__ import annotations

import logging
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
from ..config import named_device
from ..data.loaders import inputs_and_labels
from ..errors import ConfigError
from ..files.store import DiskStore
from ..networks.check import checked_model
from ..networks.model import Batch
from ..networks.several import Layout
from ..rounds import solo
from ..stacked.shaped import losing
from . import client, configs, masking, predicting, records
from .client import Site
from .guard import GUARD, guarded, sample_parts, told
from .holding import Rule
from .job import Job as Job  # part of what this module offers
from .job import refuse_both
from .rehearsal import rehearse

KEPT = 64  # clients whose data a process caches
PARTS = ("train", "test", "calibration")
SITES: dict[tuple[str, int], Loaded] = {}  # cache of loaded clients, by plug and client
LOADING = threading.Lock()
WARNED: set[tuple[str, str]] = set()  # settings that were warned of, by plug
log = logging.getLogger("bayflower")


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
            attribute called head, else the Linear that gives the logits
    layer   MetaVD and SNIP: the linear layer that the strategy's dropout_layer will name
    state   folder for the client's state; by default state-dir of the node's configuration, else
            bayflower-runs/state in the home folder
    loss    your own loss in place of cross-entropy: a function of (logits, labels) that returns one
            number a sample; the method's own terms stay
    classes task=ordinal: the number of classes, which is the same on all clients
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
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        classes: int = 0,
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
        self.export, self.mods, self.loss = tuple(export), list(mods), loss
        self.classes = classes
        if unknown := sorted(set(export) - {"pt2", "onnx"}):
            raise ConfigError(f"export must name pt2 or onnx, got {unknown[0]!r}")
        # A simulation copies this object for every message. The copies share the cache by name.
        self.name = uuid.uuid4().hex

    # -- what Flower calls ------------------------------------------------------------------------
    def app(self) -> ClientApp:
        """Return the ClientApp that answers all messages of a Bayflower strategy."""
        app = ClientApp(mods=[guarded])
        app.query()(self.query)
        app.train(mods=self.mods)(self.train)
        app.evaluate()(self.evaluate)
        return app

    def query(self, message: Message, context: Context) -> Message:
        """Return what this client reports of itself. One trial step runs first, so that an
        unsuitable network fails before training.
        """
        site = self.site(context, message)
        if masking.asked(message):
            return masking.answer(message, site.client, site.store, site.peers)
        with losing(self.loss):
            rehearse(self.row, site, self.layer, predicting.read(task_in(message)))
        return client.client_app(lambda _: site)(message, context)

    def train(self, message: Message, context: Context) -> Message:
        """Return the reply to a round, trained with the strategy's settings."""
        self.check(message)
        self.compare(message, context)
        with losing(self.loss):
            return client.answer(message, self.site(context, message), client.train_reply)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Return the test of the personal model after the last round; the model is saved beside the
        client's state.
        """
        self.check(message)
        reply = partial(client.evaluate_reply, formats=self.export)
        with losing(self.loss):
            return client.answer(message, self.site(context, message), reply)

    def begin(self, message: Message, context: Context) -> Job:
        """Return the round as a job for your own training loop; `Job.reply` ends it."""
        self.check(message)
        loaded = self.loaded(context, message)
        return Job(message, loaded.site, loaded.split, self.loss)

    # -- inside -----------------------------------------------------------------------------------
    def check(self, message: Message) -> None:
        """Raise if the server runs a different method."""
        asked = str(records.header(message, ("method",))["method"])
        if methods.get(asked).stem != self.row.stem:
            raise ConfigError(
                f"this client was made for {self.row.name}, but the server runs {asked}; name the "
                "same method on both sides"
            )

    def compare(self, message: Message, context: Context) -> None:
        """Warn once of each setting of local training in the app's run config that is not the
        strategy's.
        """
        head = records.header(message, ("method", "instructions"))
        _, training = told(head["method"], head["instructions"])
        if self.loss is not None:
            refuse_both(training)
            predicting.refuse_loss(training)
        for name, text in configs.differing(training, context.run_config).items():
            if (self.name, name) not in WARNED:
                WARNED.add((self.name, name))
                log.warning("%s", text)

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
        asked = Asked(rule, task_in(message) if message is not None else "")
        with LOADING:
            known = SITES.get((self.name, client))
            if known is None or known.asked != asked:
                if known is None and len(SITES) == KEPT:
                    SITES.pop(next(iter(SITES)))
                known = SITES[self.name, client] = self.load(client, context, asked)
        if (guard := GUARD.get()) is not None:
            guard.use(lambda: sample_parts(known.site.data))
        return known

    def load(self, client: int, context: Context, asked: Asked) -> Loaded:
        """Return the client with its data on the device and its network checked."""
        parts, rule, training = self.data(context), asked.rule, predicting.read(asked.task)
        if self.loss is not None:
            predicting.refuse_loss(training)
        if not isinstance(parts, (tuple, list)) or len(parts) not in (2, 3):
            raise ConfigError(
                f"data must return (train, test) or (train, test, calibration), got "
                f"{type(parts).__name__}; e.g. return (x_train, y_train), (x_test, y_test)"
            )
        device = named_device(self.device)
        first, _ = inputs_and_labels(parts[0], PARTS[0])
        layout = None if isinstance(first, Tensor) else Layout.of(first)
        train, *others = (
            batch(part, what, device, layout) for part, what in zip(parts, PARTS, strict=False)
        )
        for what, part in zip(PARTS[1:], others, strict=False):
            if len(part.y) and part.x.shape[1:] != train.x.shape[1:]:
                raise ConfigError(
                    f"train has samples of shape {tuple(train.x.shape[1:])}, {what} has "
                    f"{tuple(part.x.shape[1:])}; give both the same shape"
                )
        train, *others = (
            part._replace(
                y=predicting.targets(training.task, part.y, what, part.mask.dtype, self.classes)
            )
            for part, what in zip([train, *others], PARTS, strict=False)
        )
        labels = torch.cat([train.y, *(part.y for part in others if len(part.y))])
        task = predicting.task_of(training, train.y, self.classes)
        model = checked_model(self.model, train.x, labels, self.head, layout=layout, task=task)
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
        peers, only = masking.told(context.node_config)
        site = site._replace(peers=peers, secure_only=only)
        return Loaded(asked, held is not None and not given, site)


def task_in(message: Message) -> str:
    """Return what the strategy says of its task; nothing if targets are classes."""
    return str(records.header(message, ()).get(predicting.TASK, ""))


class Asked(NamedTuple):
    """What the strategy says of a client's data."""

    rule: Rule | None  # of held-out samples
    task: str


class Loaded(NamedTuple):
    """A client with its data."""

    asked: Asked
    split: bool  # whether samples were taken out of the user's training part
    site: Site


def batch(source: Any, what: str, device: torch.device, layout: Layout | None = None) -> Batch:
    """Return the user's samples as one batch on the device; several inputs are packed."""
    parts, y = inputs_and_labels(source, what)
    x = layout.pack(parts, what) if layout and not isinstance(parts, Tensor) else parts
    if not isinstance(x, Tensor) or (layout and x is parts):
        raise ConfigError(f"train and {what} must have the same inputs")
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return Batch(x.to(device), y.to(device), torch.ones(len(y), dtype=dtype, device=device))
