"""Optimisers as pure functions, so that the clients of a round can be stepped together; the numbers
are torch.optim's.

`update(params, grads, state)` returns new tensors. Every client has its own state, made fresh at
the start of a phase. Where the learning rate follows a schedule, the state holds the share of it
that the next step takes: a tensor, so that a recorded step can be replayed with another rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..tree import Tensors

OptimizerName = Literal["sgd", "adam", "adamw", "rmsprop"]
NAMES = ("sgd", "adam", "adamw", "rmsprop")
SHARE = "share"  # the only name in `OptState.rate`
FEW = 4  # tensors up to which each has a kernel of its own


class OptState(NamedTuple):
    """Steps done; first moment (momentum); second moment; the share of `lr` that the next step
    takes. Dicts are empty where the optimiser has no such moment, or no schedule.
    """

    steps: Tensor
    first: Tensors
    second: Tensors
    rate: Tensors = {}


@dataclass(frozen=True)
class Optimizer:
    """`sgd` (with momentum, or Nesterov's), `adam`, `adamw` or `rmsprop`, with weight decay added
    to the gradient as in torch.optim; `adamw` shrinks the parameters instead.
    """

    name: OptimizerName = "sgd"
    lr: float = 0.01
    momentum: float = 0.0  # sgd and rmsprop
    weight_decay: float = 0.0
    clip_norm: float = 0.0  # gradients are scaled down to this norm; 0 = never
    betas: tuple[float, float] = (0.9, 0.999)  # adam
    alpha: float = 0.99  # rmsprop
    eps: float = 1e-8
    nesterov: bool = False  # sgd
    scheduled: bool = False  # whether the state holds the share of `lr` that a step takes

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(
                f"optimizer must be {', '.join(NAMES[:-1])} or {NAMES[-1]}, got {self.name!r}"
            )
        if not self.lr > 0:
            raise ConfigError(f"lr must be positive, got {self.lr}")
        for name in ("momentum", "weight_decay", "clip_norm"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name} must not be negative, got {getattr(self, name)}; 0 switches it off"
                )
        if self.adaptive and self.momentum:
            raise ConfigError(
                f"momentum is for sgd and rmsprop, got {self.momentum} with {self.name}; leave it "
                "at 0"
            )
        if self.nesterov and not (self.name == "sgd" and self.momentum):
            raise ConfigError(
                f"nesterov is for sgd with momentum, got {self.name} with momentum "
                f"{self.momentum}; set optimizer=sgd momentum=0.9, or leave nesterov off"
            )

    @property
    def adaptive(self) -> bool:
        """Return whether the rule is Adam's, with either kind of weight decay."""
        return self.name in ("adam", "adamw")

    @property
    def plain(self) -> bool:
        """Return whether a step is the gradient times `lr`, the same at every step."""
        more = (self.momentum, self.weight_decay, self.clip_norm, self.scheduled)
        return self.name == "sgd" and not any(more)

    def init(self, params: Tensors, stacked: tuple[int, ...] = ()) -> OptState:
        """Return the state before the first step; of stacks of clients, `stacked` is their number
        (one entry).
        """

        def zeros(wanted: bool) -> Tensors:
            return {name: torch.zeros_like(value) for name, value in params.items() if wanted}

        some = next(iter(params.values()), torch.zeros(()))
        return OptState(
            steps=some.new_zeros(stacked),
            first=zeros(self.adaptive or bool(self.momentum)),
            second=zeros(self.name != "sgd"),
            rate={SHARE: some.new_ones(stacked)} if self.scheduled else {},
        )

    def decayed(self) -> float:
        """Return the weight decay that joins the gradient: none with adamw."""
        return 0.0 if self.name == "adamw" else self.weight_decay

    def update(self, params: Tensors, grads: Tensors, state: OptState) -> tuple[Tensors, OptState]:
        """Return (parameters, state) after one step down `grads`; nothing moves without any."""
        if not grads:
            return params, state
        if self.clip_norm:
            grads = clip(grads, self.clip_norm)
        if decay := self.decayed():
            grads = {name: grad + decay * params[name] for name, grad in grads.items()}
        count = state.steps + 1
        if self.adaptive:
            return self._adam(params, grads, state, count)
        second = state.second
        if self.name == "rmsprop":
            second = {
                name: self.alpha * second[name] + (1 - self.alpha) * grad * grad
                for name, grad in grads.items()
            }
            grads = {name: grad / (second[name].sqrt() + self.eps) for name, grad in grads.items()}
        first = state.first
        if self.momentum:
            first = {name: self.momentum * first[name] + grad for name, grad in grads.items()}
            grads = (
                {name: grad + self.momentum * first[name] for name, grad in grads.items()}
                if self.nesterov
                else first
            )
        after = OptState(count, first, second, state.rate)
        if state.rate:
            rate = self.lr * state.rate[SHARE]
            return {name: value - rate * grads[name] for name, value in params.items()}, after
        return {
            name: torch.sub(value, grads[name], alpha=self.lr) for name, value in params.items()
        }, after

    def update_stack(self, params: Tensors, grads: Tensors, state: OptState) -> None:
        """Do what `update` does, in place on stacks of clients that have all taken the same number
        of steps.
        """
        if not grads:
            return
        names = list(grads)
        values, slopes = [params[name] for name in names], [grads[name] for name in names]
        if self.clip_norm:
            total = (
                torch.stack([slope.flatten(1).square().sum(1) for slope in slopes]).sum(0).sqrt()
            )
            scale = torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)
            slopes = [slope * scale.reshape(-1, *(1,) * (slope.ndim - 1)) for slope in slopes]
        if decay := self.decayed():
            slopes = list(torch._foreach_add(slopes, values, alpha=decay))
        share = state.rate.get(SHARE)  # (clients,) where there is a schedule
        if self.name == "sgd" and not self.momentum:  # which does not count its steps
            if share is not None:
                slopes = scaled(slopes, share)
            # these go in one kernel
            alike = [
                value.stride() == slope.stride()
                for value, slope in zip(values, slopes, strict=True)
            ]
            for kind in {True, False} & set(alike):
                mine, yours = (
                    [x for x, a in zip(tensors, alike, strict=True) if a == kind]
                    for tensors in (values, slopes)
                )
                if len(mine) > FEW:
                    torch._foreach_add_(mine, yours, alpha=-self.lr)
                    continue
                for value, slope in zip(mine, yours, strict=True):  # uses more of a GPU
                    value.add_(slope, alpha=-self.lr)
            return
        state.steps.add_(1)
        first, second = (
            [moments[name] for name in names if name in moments]
            for moments in (state.first, state.second)
        )
        if self.adaptive:
            beta1, beta2 = self.betas
            count = state.steps[0]
            torch._foreach_lerp_(first, slopes, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, slopes, slopes, 1 - beta2)
            below = torch._foreach_sqrt(second)
            torch._foreach_div_(below, (1 - beta2**count).sqrt())
            torch._foreach_add_(below, self.eps)
            above = list(torch._foreach_mul(first, self.lr / (1 - beta1**count)))
            if self.name == "adamw" and self.weight_decay:
                if share is None:
                    torch._foreach_mul_(values, 1 - self.lr * self.weight_decay)
                else:
                    kept = scaled(values, 1 - self.lr * self.weight_decay * share)
                    torch._foreach_copy_(values, kept)
            if share is not None:
                above = scaled(above, share)
            torch._foreach_addcdiv_(values, above, below, -1.0)
            return
        if self.name == "rmsprop":
            torch._foreach_mul_(second, self.alpha)
            torch._foreach_addcmul_(second, slopes, slopes, 1 - self.alpha)
            below = torch._foreach_sqrt(second)
            torch._foreach_add_(below, self.eps)
            slopes = list(torch._foreach_div(slopes, below))
        if self.momentum:
            torch._foreach_mul_(first, self.momentum)
            torch._foreach_add_(first, slopes)
            slopes = (
                list(torch._foreach_add(slopes, first, alpha=self.momentum))
                if self.nesterov
                else first
            )
        if share is not None:
            slopes = scaled(slopes, share)
        torch._foreach_add_(values, slopes, alpha=-self.lr)

    def _adam(
        self, params: Tensors, grads: Tensors, state: OptState, count: Tensor
    ) -> tuple[Tensors, OptState]:
        beta1, beta2 = self.betas
        first = {
            name: beta1 * state.first[name] + (1 - beta1) * grad for name, grad in grads.items()
        }
        second = {
            name: beta2 * state.second[name] + (1 - beta2) * grad * grad
            for name, grad in grads.items()
        }
        rate = self.lr * state.rate[SHARE] if state.rate else self.lr
        step = rate / (1 - beta1**count)
        root = (1 - beta2**count).sqrt()
        if self.name == "adamw" and self.weight_decay:
            params = {
                name: value * (1 - rate * self.weight_decay) for name, value in params.items()
            }
        moved = {
            name: value - step * first[name] / (second[name].sqrt() / root + self.eps)
            for name, value in params.items()
        }
        return moved, OptState(count, first, second, state.rate)


def clip(grads: Tensors, norm: float) -> Tensors:
    """Return the gradients scaled so that their joint Euclidean norm is at most `norm`."""
    total = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    scale = torch.clamp(norm / (total + 1e-6), max=1.0)
    return {name: grad * scale for name, grad in grads.items()}


def scaled(stacks: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Return each stack (clients, …) times its client's factor."""
    return [stack * factor.reshape(-1, *(1,) * (stack.ndim - 1)) for stack in stacks]
