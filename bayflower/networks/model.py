"""Networks as pure functions; the networks of the papers by name.

`Model` wraps any `torch.nn.Module` factory: parameters and buffers are passed in and returned, the
module gives only the structure. What never changes stays in the module and never travels: frozen
parameters (requires_grad=False) and buffers that are not persistent. Tied weights are one parameter
under the first of their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..stacked.constants import outside
from ..stacked.losses import mean_nll, nll
from ..stacked.masked import mask_norms, real_samples
from ..stacked.randomly import with_our_numbers
from ..stacked.rewriting import Seen, passing
from ..stacked.shaped import PLAIN, is_mixed, own_mean, shape, shaped_mean
from ..stacked.stackable import for_stacks
from ..tasks import EXTRA, Task
from ..tasks.classes import Classification
from ..tree import Tensors
from .heads import called_last, features_of, find_head, has_head, head_parameters
from .manner import Manner, couples, unstackable
from .parts import (
    called,
    cast,
    converted,
    first_names,
    further_places,
    norm_names,
    persistent,
    tidied,
    trainable,
    unflattened,
)
from .several import Layout

# frozen layers that nobody loads weights into are initialised with it, so that they are the same on
# every client
FROZEN_SEED = 0


class Batch(NamedTuple):
    """Samples of one client; `mask` is 1 for a sample, 0 for padding, in the parameters' dtype."""

    x: Tensor  # (B, ...)
    y: Tensor  # (B,)
    mask: Tensor  # (B,)


class Anatomy(NamedTuple):
    """What a server knows of a network: names only. Clients report it, so that a server needs no
    model of its own.
    """

    trainable: tuple[str, ...]  # names of parameters
    buffers: tuple[str, ...]  # names of buffers
    norm_names: frozenset[str]  # parameters and buffers of normalisation layers
    head_names: frozenset[str]  # parameters of the classifier; empty if none was found


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return Σ mask·values / Σ mask; 0 where the mask is empty."""
    count = mask.sum()
    return (values * mask).sum() / torch.where(count > 0, count, torch.ones_like(count))


class Model:
    """A network without its numbers. `factory` builds the module; one logit means a binary task,
    else one logit a class.

    `head` names the classifier: one layer, or several by their prefixes; without it an attribute
    called head, else the Linear layer that gives the logits, else the last Linear.
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        num_classes: int,
        name: str = "",
        head: str | Sequence[str] | None = None,
        task: Task | None = None,
    ) -> None:
        self.factory = factory
        self.num_classes = num_classes
        self.name = name
        self.task = task or Classification(num_classes)  # what is predicted
        self._train = with_our_numbers(unflattened(self.made(FROZEN_SEED)).train())
        self._eval = unflattened(self.made(FROZEN_SEED)).eval()
        if not self.shapes:
            raise ConfigError(
                f"model {name or 'given'} has no trainable parameters; nothing could be learned"
            )
        self._head = head
        self._fixed: dict[tuple[torch.device, torch.dtype], Tensors] = {}  # the constants
        self.own: Tensor | None = None  # extra parameters that only the client at work has
        self.bf16 = False  # whether training passes have products of bfloat16
        self.further = further_places(self._train)  # of tensors that layers share
        self.stacked = False  # whether layers have the form for stacks on a GPU
        self.in_stack = False  # whether it runs as one of a stack, on any device
        self.seen = Seen()  # what passes have shown
        self.manner = Manner()  # what trying has shown (`mixing.py`)
        # what `build` needs to make it again; empty for a network that is not ours
        self.recipe: dict[str, Any] = {}
        self.layout: Layout | None = None  # of samples that are packed from several inputs

    def made(self, seed: int) -> nn.Module:
        """Return a new module, initialised with `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            module = self.factory()
        if (extra := self.task.extra()) and not self.task.extra_stays:
            module.register_parameter(EXTRA, nn.Parameter(torch.tensor(extra)))
        return module

    def initial(self, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensors, Tensors]:
        """Return (parameters, buffers) of the seeded initialisation in the order of names."""
        module = self.made(seed)
        params = {
            name: value.detach().to(dtype).clone()
            for name, value in sorted(trainable(module).items())
        }
        return params, {
            name: cast(value.detach(), dtype).clone()
            for name, value in sorted(persistent(module).items())
        }

    @cached_property
    def constants(self) -> Tensors:
        """Return what never changes: frozen parameters and buffers that are not persistent, the
        same on every client.
        """
        moving = {**trainable(self._eval), **persistent(self._eval)}
        everything = [*self._eval.named_parameters(), *self._eval.named_buffers()]
        return {name: value.detach() for name, value in everything if name not in moving}

    def fixed(self, like: Tensor) -> Tensors:
        """Return the constants on the device and in the dtype of `like`."""
        key = (like.device, like.dtype)
        if key not in self._fixed:
            with outside(), torch.no_grad():
                self._fixed[key] = {
                    name: cast(value, like.dtype).to(like.device)
                    for name, value in self.constants.items()
                }
        return self._fixed[key]

    def module(self, params: Tensors, buffers: Tensors) -> nn.Module:
        """Return a new module of the user's kind that holds these numbers, constants included,
        where and in what dtype they are.
        """
        some = next(iter(params.values()))
        module = converted(self.made(FROZEN_SEED), some)
        if self.task.extra_stays and EXTRA in params:
            module.register_parameter(EXTRA, nn.Parameter(torch.empty_like(params[EXTRA])))
        known = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, value in {**self.fixed(some), **params, **buffers}.items():
                if name in known:
                    known[name].copy_(value)
        return module

    def forward(
        self, params: Tensors, buffers: Tensors, x: Tensor, train: bool, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensors]:
        """Return (logits, buffers after the pass); the input buffers are left as they were.

        `mask` says which samples of a training batch are real; layers that couple samples need it
        where batches are padded. Random layers take the numbers of the step (`stacked/chance.py`).
        """
        module = self.module_for(train)
        x = x.clone() if self.manner.writes else x
        if self.manner.changes and not train:
            params = {name: value.clone() for name, value in params.items()}
        if EXTRA in buffers:  # a client's own, which stays as it is
            own = {EXTRA: buffers[EXTRA]}
            rest = {name: value for name, value in buffers.items() if name != EXTRA}
            out, rest = self.with_own(buffers[EXTRA]).forward(params, rest, x, train, mask)
            return out, {**rest, **own}
        if train and buffers:
            buffers = {name: value.clone() for name, value in buffers.items()}
        if self.constants:
            fixed = self.fixed(next(iter(params.values())))
            params = {
                **{name: value for name, value in fixed.items() if name not in buffers},
                **params,
            }
        low: Any = nullcontext()
        if train and self.bf16:
            low = torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False)
        own_form = passing(self.seen, train, self.in_stack, x)
        with real_samples(mask), own_form, tidied(module, self.manner.left), low:
            out = called(module, {**params, **buffers}, x, self.further)
        if train and self.bf16:
            out = out.to(next(iter(params.values())).dtype)
        return self.with_extra(out, params), buffers

    def with_extra(self, out: Tensor, params: Tensors) -> Tensor:
        """Return the network's outputs with the task's extra parameters behind them."""
        if not isinstance(out, Tensor) or out.ndim != 2:  # refused later, with its layer's name
            return out
        if EXTRA in params:
            extra = params[EXTRA]
        elif not self.task.extra_stays:
            return out
        else:  # of the client at work; where nobody is, what everyone starts with
            extra = out.new_tensor(self.task.extra()) if self.own is None else self.own
        return torch.cat([out, extra.to(out.dtype).expand(out.shape[0], -1)], -1)

    def with_own(self, extra: Tensor) -> Model:
        """Return this model with a client's own extra parameters of the task."""
        other = copy(self)
        other.own = extra
        return other

    def for_stacks(self, gpu: bool) -> Model:
        """Return this model for stacks of clients: BatchNorm leaves padding out, and on a GPU
        layers have a form made for stacks.
        """
        other = copy(self)
        other.stacked, other.in_stack, other.seen = gpu, True, Seen()
        change = for_stacks if gpu else deepcopy
        other._train, other._eval = (
            mask_norms(change(module)) for module in (self._train, self._eval)
        )
        return other

    def forward_features(
        self, params: Tensors, buffers: Tensors, x: Tensor, train: bool, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Return (logits, features, buffers after the pass); the features are what the head's first
        layer gets, (B, …).
        """
        seen: list[Tensor] = []

        def look(head: nn.Module, args: Any, named: dict[str, Any]) -> None:
            seen.append(next(one for one in (*args, *named.values()) if isinstance(one, Tensor)))

        module = self.module_for(train).get_submodule(self.head)
        handle = module.register_forward_pre_hook(look, with_kwargs=True)
        try:
            logits, buffers = self.forward(params, buffers, x, train, mask)
        finally:
            handle.remove()
        features = features_of(seen, logits, module, self.head, self.name or "given")
        return logits, features, buffers

    def forward_through(
        self,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        train: bool,
        layer: str,
        change: Callable[[Tensor, Tensor], Tensor],
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensors]:
        """Return what `forward` does, with the output of `layer` replaced by change(its input, its
        output).
        """
        module = self.module_for(train).get_submodule(layer)
        dtype = next(iter(params.values())).dtype

        def replaced(_: nn.Module, args: Any, named: dict[str, Any], out: Tensor) -> Tensor:
            x = (*args, *named.values())[0]
            with torch.autocast(out.device.type, enabled=False):
                return change(x.to(dtype), out.to(dtype))

        handle = module.register_forward_hook(replaced, with_kwargs=True)
        try:
            return self.forward(params, buffers, x, train, mask)
        finally:
            handle.remove()

    def module_for(self, train: bool) -> nn.Module:
        """Return the module of this mode; it gives only the structure."""
        return self._train if train else self._eval

    def constants_in_use(self) -> list[Tensors]:
        """Return the constants, as often as they were copied to a device or dtype."""
        return list(self._fixed.values())

    def nll(self, logits: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return −log p(y|x) of each sample (B,)."""
        if self.stacked and self.task.classes and logits.shape[-1] > 1:
            return nll(logits, y)
        return self.task.nll(logits, y, torch.ones_like(logits[..., 0]) if mask is None else mask)

    def mean_nll(self, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return the training loss: the mean of −log p(y|x) over the samples that the mask marks,
        or what the recipe makes of it; y may be shares of classes (B, K).
        """
        logits = logits.to(mask.dtype)  # the user's own loop may run in mixed precision
        if not self.task.classes:
            return masked_mean(self.task.nll(logits, y, mask), mask)
        if (form := shape()) is not PLAIN or is_mixed(y):
            if form.own is not None:
                return own_mean(form.own(logits, y), mask, self.in_stack)
            return shaped_mean(logits, y, mask, form)
        if self.stacked and logits.shape[-1] > 1:
            return mean_nll(logits, y, mask)
        return masked_mean(self.nll(logits, y, mask), mask)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return class probabilities (B, C), or what another task predicts."""
        return self.task.predict(logits)

    @property
    def coupled(self) -> bool:
        """Return whether samples of a training batch influence each other (BatchNorm, Cox)."""
        return self.task.coupled or self.manner.mixes or couples(self._train)

    @property
    def draws(self) -> bool | None:
        """Return whether a training pass draws random numbers (dropout); None before the first."""
        return self.seen.draws

    @property
    def unstackable(self) -> str | None:
        """Return why it cannot be trained as a stack, as far as its layers and trying tell."""
        return unstackable(self._train) or self.manner.why(self.name or "the network")

    @cached_property
    def norm_names(self) -> frozenset[str]:
        """Return the names of parameters and buffers that belong to normalisation layers."""
        return norm_names(self._train)

    def look_for_head(self, x: Tensor) -> None:
        """Take the layer that gives the logits of samples x as the head, if none is named."""
        if self._head is None and not has_head(self._eval):
            self._head = called_last(self._eval, x)

    @cached_property
    def head_layers(self) -> tuple[str, ...]:
        """Return the layers of the head in the network's order."""
        return find_head(self._train, self._head, self.name or "given")

    @cached_property
    def head(self) -> str:
        """Return the name of the head's first layer: its input is the features."""
        if not self.head_layers:
            raise ConfigError(
                f"model {self.name or 'given'} has no head: no layer is called head or is a "
                "Linear; name one, e.g. head='fc'"
            )
        return self.head_layers[0]

    @cached_property
    def head_names(self) -> frozenset[str]:
        """Return the names of the head's parameters."""
        layers = (self.head, *self.head_layers[1:])
        names = head_parameters(first_names(self._train), layers) & frozenset(self.shapes)
        if not names:
            raise ConfigError(
                f"the head {', '.join(layers)} has no trainable parameters; name another layer, "
                "e.g. head='classifier'"
            )
        return names

    @cached_property
    def tied(self) -> dict[str, str]:
        """Return the parameters that several layers share, each with another of its names."""
        return {one: name for name, one in first_names(self._train).items() if name != one}

    @cached_property
    def further_names(self) -> dict[str, str]:
        """Return the further names of trainable parameters that are tied, each with the first."""
        first = first_names(self._train).items()
        return {name: one for name, one in first if name != one and one in self.shapes}

    @cached_property
    def anatomy(self) -> Anatomy:
        """Return the names that server halves need."""
        try:
            head = self.head_names
        except ConfigError:
            head = frozenset()
        return Anatomy(
            tuple(trainable(self._train)), tuple(persistent(self._train)), self.norm_names, head
        )

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, in the order of names."""
        return {name: tuple(value.shape) for name, value in sorted(trainable(self._train).items())}

    @cached_property
    def num_parameters(self) -> int:
        """Return the number of trainable numbers."""
        return sum(math.prod(shape) for shape in self.shapes.values())
