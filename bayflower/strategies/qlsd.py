"""QLSD, server half (Vono et al. 2022, AISTATS): samples of the posterior by Langevin steps whose
gradients travel quantised.

    paper        here                   shape
    theta        state.params           by name: the newest sample
    eta_bar      state.memory           by name, float64: the sum of all clients' memories
    gamma        config.qlsd_step       ()
    b, A         number, replies        (): all clients, and those of the round
    alpha        rate                   (): by tensor

    g = eta_bar + (b/|A|) Σ_k sent_k                                                         [eq. 3]
    theta ← theta − gamma g + √(2 gamma) ξ,   ξ standard normal                              [eq. 4]
    eta_bar ← eta_bar + alpha Σ_k sent_k,   alpha = 1/(1 + min(d/s², √d/s))                  [eq. 5]

With qlsd_step = 0, gamma = 2/(samples of all clients), and instead of [eq. 4]

    theta ← theta − m/(1 + ‖m‖/(0.1 ‖theta‖)) + √(2 gamma T) ξ,   m = gamma g                [eq. 6]
    T = min(1, tau/(3 F)),   F the most inputs of a unit                                     [eq. 7]

tensor by tensor: a tamed step (Brosse et al. 2019) of a cold posterior. Its prior N(0, T/tau) is as
wide as the initial weights of the widest layer. With T = 1 the noise of a step is several times
these weights, and wide networks diverge.

ξ is drawn from a key and the round's number, which are parts of the state: so `finalise` is a
function of its arguments, the same on every engine, and a resumed run repeats it.

After `qlsd_burn_in` rounds mean and variance of the samples are kept: they are the posterior that
clients are sent. By default the samples start anew each time that their number has doubled: those
of the way to the posterior do not count for long. A client that has lost its memory says so by
`turns` ≤ 0; all memories then start anew (`epoch`).

Departs: [eq. 6] and [eq. 7] are ours; the 2 and the 0.1 are the best of 18 pairs on digits and
heart disease (seed 0, 30 rounds). Tensors are quantised one by one, as in the authors' code; the
paper quantises the whole vector. The variant with control variates (QLSD++) is left out. Running
statistics are averaged by sample count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Statistic, Sum
from ..errors import ConfigError
from ..maths.hypernet import generator
from ..settings import setting
from ..shown import Heading
from ..tree import Tensors, digest
from . import fedavg, pvi

LEVELS = 32767  # the largest code
# if qlsd_step is 0:
RATE = 2.0  # step of the gradient of the mean loss
LONGEST = 0.1  # move of a tensor by its gradient, in parts of the tensor's own length
LEAST = 0.02  # root mean square of a tensor that counts as its length, at least


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for QLSD."""

    qlsd_step: float = setting(
        0.0,
        "step size: of the gradient of the loss summed over all samples of all clients; 0 = 2 / "
        "(number of these samples), where no tensor moves by more than a tenth of its length, and "
        "the posterior is as cold as wide layers need",
    )
    qlsd_prior: float = setting(5.0, "precision of the prior N(0, 1/precision)")
    qlsd_levels: int = setting(256, "levels of the quantiser")
    qlsd_memory: bool = setting(True, "whether clients send the difference to what they remember")
    qlsd_burn_in: int = setting(
        -1,
        "rounds before samples count for mean and variance; -1 = they start anew in rounds 3, 6, "
        "11, 22, 44, 88, …, so that the first ones are forgotten",
    )
    qlsd_noise: float = setting(
        1.0, "size of the Langevin noise; 1 = the posterior (qlsd_step=0: a cold one), 0 = descent"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qlsd_burn_in < -1:
            raise ConfigError(f"qlsd_burn_in must be at least -1, got {self.qlsd_burn_in}")
        for name in ("qlsd_step", "qlsd_prior", "qlsd_noise"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}"
                )
        if not 1 <= self.qlsd_levels <= LEVELS:
            raise ConfigError(f"qlsd_levels must be in [1, {LEVELS}], got {self.qlsd_levels}")


class State(NamedTuple):
    """The newest sample, mean and variance of the samples that count, and the memories' sum."""

    params: Tensors
    buffers: Tensors
    mean: Tensors
    squares: Tensors  # float64: Σ of squared distances to the mean
    memory: Tensors  # float64
    turns: Tensors  # "k": how often client k has sent something
    epoch: Tensor  # int64
    number: Tensor  # int64: all clients
    rounds: Tensor  # int64: with replies
    kept: Tensor  # int64: samples that count
    key: Tensor  # int64


class Broadcast(NamedTuple):
    """What every client is sent."""

    params: Tensors
    buffers: Tensors
    mean: Tensors
    spread: Tensors  # standard deviations of the samples
    number: Tensor
    epoch: Tensor


class Update(NamedTuple):
    """What a client sends: a quantised gradient, or its difference to the client's memory."""

    num_examples: Tensor
    buffers: Tensors
    codes: Tensors  # int16, at most qlsd_levels in size
    norms: Tensors  # one number a tensor
    turns: Tensor


class Server(pvi.Server):
    """Takes Langevin steps down the sum of the clients' gradients."""

    state_type: ClassVar[type] = State  # type: ignore[assignment]
    broadcast_type: ClassVar[type] = Broadcast  # type: ignore[assignment]
    # the memory is counted here and there, as a factor is; codes have no size of their own
    update_fields = {"buffers": "buffers", "norms": "factor"}
    headings = {
        "sample_spread": Heading(
            "Spread of the samples", "mean standard deviation", "Of all weights, over rounds."
        )
    }

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the initial network as the first sample."""
        device = next(iter(params.values())).device
        known = digest({name: value.float() for name, value in params.items()})
        zero = torch.zeros((), dtype=torch.int64, device=device)
        flat = {n: torch.zeros_like(v).double() for n, v in params.items()}
        number = torch.full_like(zero, max(len(clients), 1))
        key = torch.full_like(zero, int(known[:15], 16))
        return State(params, buffers, params, flat, flat, {}, zero, number, zero, zero, key)

    def admit(self, state: Any, client: int) -> Any:
        """Return the state with one more client."""
        return state._replace(number=state.number + 1)

    def broadcast(self, state: Any, client: int) -> Any:
        """Return sample, mean and spread, the same for every client."""
        divisor = (state.kept - 1).clamp(min=1).double()
        spread = {
            n: (state.squares[n] / divisor).sqrt().to(v.dtype) for n, v in state.params.items()
        }
        return Broadcast(state.params, state.buffers, state.mean, spread, state.number, state.epoch)

    def expects(self, state: Any) -> Any:
        """Return the shape of an update."""
        number = torch.zeros((), dtype=torch.int64)
        codes = {n: torch.zeros_like(v, dtype=torch.int16) for n, v in state.params.items()}
        norms = {n: v.new_zeros(()) for n, v in state.params.items()}
        return Update(number, state.buffers, codes, norms, number)

    def check(self, state: Any, client: int, update: Any) -> str | None:
        """Return why the gradient cannot be used, or None."""
        largest = max(int(value.int().abs().max()) for value in update.codes.values())
        if largest > self.config.qlsd_levels:
            return f"a code must be at most qlsd_levels = {self.config.qlsd_levels}, got {largest}"
        least = min(float(value) for value in update.norms.values())
        if least < 0:
            return f"a norm must not be negative, got {least:.3g}"
        return super().check(state, client, update)

    def bounds(
        self, state: Any, client: int, update: Any, limits: Any, training: Any
    ) -> str | None:
        """Return None: norms are bounded as all numbers are."""
        return None

    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return the decoded gradient, (n, n·buffers), the client's turns and 1."""
        return {**self.gradients(update), **self.line(state, client, int(update.turns))}

    def summand(self, state: Any, client: int, update: Any) -> Statistic:
        """Return the same without turns: a client that has lost its memory says so itself."""
        return {**self.gradients(update), "reset": (update.turns < 0).long()}

    def gradients(self, update: Any) -> Statistic:
        """Return the decoded gradient, (n, n·buffers) and 1."""
        return {
            "num_examples": update.num_examples,
            "replies": torch.ones_like(update.num_examples),
            **fedavg.weighted("buffers", update.buffers, update.num_examples),
            **{
                f"sent/{n}": decoded(code, update.norms[n], self.config.qlsd_levels)
                for n, code in update.codes.items()
            },
        }

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum:
        """Return the same sums over stacked updates."""
        number = updates.num_examples
        found: dict[str, Tensor] = {
            "num_examples": number.sum(),
            "replies": torch.ones_like(number).sum(),
            **fedavg.summed("buffers", updates.buffers, number.double()),
        }
        for n, code in updates.codes.items():
            norm = updates.norms[n].reshape(-1, *(1,) * (code.ndim - 1))
            found[f"sent/{n}"] = decoded(code, norm, self.config.qlsd_levels).sum(0)
        reset = 0
        for client, turns in zip(clients, updates.turns.tolist(), strict=True):
            line = self.line(state, client, turns)
            reset += int(line.pop("reset"))
            found |= {name: value.to(number.device) for name, value in line.items()}
        return {**found, "reset": torch.tensor(reset, device=number.device)}

    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the next sample [eq. 3] [eq. 4] and the memories' sum [eq. 5]; no reply leaves the
        state as it was.
        """
        if "num_examples" not in total:
            return state
        device = state.epoch.device
        lost = bool(int(total["reset"]))
        sent = {n: total[f"sent/{n}"].double() for n in state.params}
        each = state.number.double() / total["replies"].double()
        draw = generator("qlsd", int(state.key), int(state.rounds))
        params, memory = {}, {}
        chosen = not self.config.qlsd_step
        gamma = self.config.qlsd_step or RATE / float(each * total["num_examples"].double())
        heat = temperature(state.params, self.config.qlsd_prior) if chosen else 1.0
        size = self.config.qlsd_noise * (2 * gamma * heat) ** 0.5
        for n, value in state.params.items():
            old = torch.zeros_like(state.memory[n]) if lost else state.memory[n]
            noise = torch.randn(value.shape, generator=draw, dtype=torch.float64).to(device)
            slope = old + each * sent[n]
            move = tamed(gamma * slope, value) if chosen else gamma * slope
            params[n] = (value.double() - move + size * noise).to(value.dtype)
            rate = memory_rate(value.numel(), self.config.qlsd_levels)
            memory[n] = old + rate * sent[n] if self.config.qlsd_memory and not lost else old
        new = {
            name.removeprefix("turns/"): value.to(device)
            for name, value in total.items()
            if name.startswith("turns/")
        }
        after = state._replace(
            params=params,
            buffers=fedavg.averaged("buffers", state.buffers, total, total["num_examples"]),
            memory=memory,
            turns={} if lost else dict(sorted({**state.turns, **new}.items())),
            epoch=state.epoch + int(lost),
            rounds=state.rounds + 1,
        )
        return self.counted(after)

    def counted(self, state: Any) -> Any:
        """Return the state with the newest sample in mean and squares, if it counts (Welford)."""
        if int(state.rounds) <= self.config.qlsd_burn_in:
            return state._replace(mean=state.params)
        if self.config.qlsd_burn_in < 0 and starts_anew(int(state.rounds)):
            zero = {n: torch.zeros_like(value) for n, value in state.squares.items()}
            state = state._replace(squares=zero, kept=torch.zeros_like(state.kept))
        kept = state.kept + 1
        mean, squares = {}, {}
        for n, value in state.params.items():
            old = state.mean[n].double() if int(state.kept) else value.double()
            apart = value.double() - old
            new = old + apart / kept
            mean[n] = new.to(value.dtype)
            squares[n] = state.squares[n] + apart * (value.double() - new)
        return state._replace(mean=mean, squares=squares, kept=kept)

    def report(self, state: Any) -> dict[str, float]:
        """Return the spread of the samples, and how many count."""
        spread = torch.cat([v.flatten() for v in self.broadcast(state, 0).spread.values()])
        return {"sample_spread": float(spread.double().mean()), "samples": float(state.kept)}


def temperature(params: Tensors, prior: float) -> float:
    """Return T = min(1, τ/(3 F)) [eq. 7], F the most inputs of a unit of the network."""
    most = max((v[0].numel() for v in params.values() if v.ndim > 1), default=1)
    return min(1.0, max(prior, 1.0) / (3 * most))


def tamed(move: Tensor, value: Tensor) -> Tensor:
    """Return a move of a tensor, shorter the more of the tensor's own length it is [eq. 6]."""
    length = torch.linalg.vector_norm(value.double()).clamp(min=LEAST * value.numel() ** 0.5)
    return move / (1 + torch.linalg.vector_norm(move) / (LONGEST * length))


def starts_anew(round: int) -> bool:
    """Return whether samples count from this round on: 11 times a power of two, and 3, 6 before."""
    times, rest = divmod(round, 11)
    return round in (3, 6) or (rest == 0 and times.bit_count() == 1)


def decoded(code: Tensor, norm: Tensor, levels: int) -> Tensor:
    """Return norm × code / levels, in float64."""
    return norm.double() * code.double() / levels


def memory_rate(size: int, levels: int) -> float:
    """Return alpha for a tensor of so many numbers [eq. 5]."""
    return 1 / (1 + min(size / levels**2, size**0.5 / levels))
