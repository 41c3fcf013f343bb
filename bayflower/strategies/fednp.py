"""FedNP, server half (FedNP: Federated Neural Propagation, AAAI 2023): a Gaussian over a latent z
by expectation propagation.

    paper          here                   shape
    theta          state.params           by name: the global model
    f, NPN         state.extra            by name: the f-layer and the natural-parameter network,
                                          averaged like theta
    lambda_k       ledger "k/precision"   (D,) float64: precision of client k's factor of p(z)
    eta_k          ledger "k/shift"       (D,) float64: precision × mean
    Lambda, H      state.total            (D,) each: prior and all factors
    n_k            num_examples           ()

    theta = Σ n_k theta_k / Σ n_k                                                       [eq. 3]
    Lambda = 1 + Σ_j lambda_j,    H = Σ_j eta_j                                         [eq. 4]

Clients send the change of their factor. The ledger is the sum of a client's changes, so the total
is exact under partial participation and a factor can be taken out again: of a client that left
(`forget`), or that lost it (`turns` ≤ 0). A client whose factor is neither the
ledger's nor lost (its state, or ours, went back in time) makes all factors start anew: `epoch`
counts that, and clients drop factors of an older epoch. Secure sums (`summand`) have no ledger: the
total is the sum of all changes. Then all factors start anew if a client leaves or has lost its own.

Departs:
  E-N5  natural parameters travel; a variance 1/lambda_k is never formed. A reply whose factor would
        have a negative precision is refused.
  E-N6  the prior N(0, I) is a permanent factor; without it the posterior may be improper, for E-N12
        a site σ(f z) has no integral.
  E-N7  the weights 1/n_k do not sum to one: n_k / Σ n.
  E-N8  a round is a round: every client that takes part sends once, after its local epochs.
  E-N10 f has D outputs; `site=scalar` is the paper's single one, with which all coordinates of z
  stay equal for ever. E-N11 z has D numbers and an NPN maps them to the classifier's weights. The
  f-layer and the NPN are no part of the user's network: they are made here (seeded by the initial
  model) and sent with it. E-N16 the paper does not say where the NPN starts. Near 0, KL_theta is a
  weight decay of np_weight/epsilon on the classifier until the NPN has caught up; here it starts at
  the initial classifier (`npn_start=zero`: near 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf, Statistic, Sum
from ..errors import ConfigError, check_choices, check_least
from ..maths import npn
from ..maths.gaussian import Diagonal, product
from ..maths.guesses import holds
from ..maths.ledger import entry as entry
from ..maths.ledger import multiplied, prior
from ..maths.tilted import NODES, Backend
from ..maths.window import on_grid
from ..settings import Presets, paper, setting
from ..shown import Heading, Mark, Picture
from ..tree import Tensors, choose, digest
from . import fedavg
from .fedavg import averaged, summed, weighted

Site = Literal["vector", "scalar", "none"]
Start = Literal["classifier", "zero"]
GROUPS = ("params", "buffers", "extra")  # what is averaged
EXTRA = "fednp."  # what the names of the f-layer and the NPN begin with

SHOWN = 200  # coordinates of z in the picture of the last state


@dataclass(frozen=True)
class Config(fedavg.Tuning):
    """What the user sets for FedNP."""

    # images; speech has 16 latent numbers and 0.001. Where the NPN starts the paper does not say.
    presets: ClassVar[Presets] = paper(
        *("sgd", 0.01, 128, 10),
        weight_decay=1e-5,
        latent=10,
        np_weight=0.01,
        moments="thm2",
        site="scalar",
        npn_start="zero",
    )

    latent: int = setting(10, "D, numbers in the latent z (16 for speech, 1 for the toy problem)")
    moments: Backend = setting(
        "trapezoid",
        "moments of the tilted Gaussian: trapezoid, quadrature (with `nodes`), thm2, logz, probit",
    )
    nodes: int = setting(
        NODES, "moments=quadrature: points of the numerical integral (not clients), at least 3"
    )
    np_weight: float = setting(
        0.01,
        "lambda, weight of KL_theta + KL_z in the local loss (the paper's best for images; 0.001 "
        "for speech)",
    )
    epsilon: float = setting(
        0.1,
        "variance around the classifier's weights in KL_theta; the pull on a weight is np_weight "
        "/ epsilon",
    )
    damping: float = setting(
        0.5, "step of a factor towards its new value, in (0, 1]; 1 means no damping"
    )
    site: Site = setting(
        "vector",
        "outputs of f, which shape a client's factor (site) of p(z): vector = D of them; scalar = "
        "their mean, as in the paper, which makes all D coordinates of z equal; none = f is 0, so "
        "that nothing is learned of z: a placebo",
    )
    npn_hidden: int = setting(10, "width of the natural-parameter network's hidden layer")
    npn_start: Start = setting(
        "classifier",
        "what the natural-parameter network predicts before the first round: classifier = the "
        "initial classifier; zero = almost 0, which KL_theta then pulls the classifier to",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, latent=1, nodes=3, npn_hidden=1)
        if not (self.np_weight >= 0 and math.isfinite(self.np_weight)):
            raise ConfigError(
                f"np_weight must be finite and not negative, got {self.np_weight}; 0 is FedAvg"
            )
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise ConfigError(f"epsilon must be positive and finite, got {self.epsilon}")
        if not 0 < self.damping <= 1:
            raise ConfigError(f"damping must be in (0, 1], got {self.damping}; 1 means no damping")
        check_choices(self)


class State(NamedTuple):
    """The global model, its companions, the Gaussian over z, and who contributed what to it."""

    params: Tensors
    buffers: Tensors
    extra: Tensors
    total: Diagonal
    ledger: Tensors  # "k/precision", "k/shift", "k/turns" of every client k that ever sent a factor
    epoch: Tensor  # int64


class Broadcast(NamedTuple):
    """What every client is sent; it forms its cavity itself."""

    params: Tensors
    buffers: Tensors
    extra: Tensors
    total: Diagonal
    epoch: Tensor


class Update(NamedTuple):
    """What a client sends: its model, its number of samples, and the change of its factor."""

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    extra: Tensors
    change: Diagonal  # float64
    # int64: how often it had sent a change in this epoch before; 0 = it has no factor, -1 = it lost
    # the one that it had
    turns: Tensor


class Server(ServerHalf):
    """Averages the models and multiplies the factors."""

    headings = {
        "latent_precision": Heading(
            "Belief about the latent",
            "mean precision of z",
            "How sure the federation has become of z, over rounds.",
        )
    }

    update_fields = {"params": "model", "buffers": "buffers", "extra": "model", "change": "exact"}

    state_type = State
    broadcast_type = Broadcast

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> State:
        """Return the initial model, fresh companions, and the prior alone."""
        head = params[classifier(params, self.anatomy.head_names)]
        generator = torch.Generator().manual_seed(
            int(digest({name: value.float() for name, value in params.items()})[:15], 16)
        )
        config, inputs = self.config, head.shape[1]
        f = inputs**-0.5 * torch.randn(
            inputs, config.latent, generator=generator, dtype=torch.float64
        )
        layers = npn.initial(
            config.latent, config.npn_hidden, head.numel(), config.epsilon, generator, torch.float64
        )
        if config.npn_start == "classifier":
            layers = npn.centred(layers, head.detach().cpu().double().reshape(-1))
        extra = {
            "f.weight": f,
            "f.bias": torch.zeros(config.latent, dtype=torch.float64),
            **{f"npn.{n}": v for n, v in layers.items()},
        }
        extra = {EXTRA + name: extra[name].to(head.device, head.dtype) for name in sorted(extra)}
        return State(
            params,
            buffers,
            extra,
            prior(config.latent, head.device),
            {},
            torch.zeros((), dtype=torch.int64, device=head.device),
        )

    def broadcast(self, state: State, client: int) -> Broadcast:
        """Return the model and the total, the same for every client."""
        return Broadcast(state.params, state.buffers, state.extra, state.total, state.epoch)

    def expects(self, state: State) -> Update:
        """Return the shape of an update."""
        number = torch.zeros((), dtype=torch.int64)
        return Update(number, state.params, state.buffers, state.extra, state.total, number)

    def check(self, state: State | Broadcast, client: int, update: Update) -> str | None:
        """Return why the update cannot be used, or None."""
        count, turns = int(update.num_examples), int(update.turns)
        if not 0 < count < 2**40:
            return f"num_examples must be positive and below 2^40, got {count}"
        if not -1 <= turns < 2**40:
            return f"turns must be in [-1, 2^40), got {turns}"
        if isinstance(state, Broadcast):  # the client itself, for a secure sum
            return None
        if not self.known(state, client, turns):
            return (
                f"it changed a factor after {turns} turns that the ledger does not know; its "
                "next one starts anew"
            )
        least = float(self.factor(state, client, turns, update.change).precision.min())
        if least > -1e-9:
            return None
        return f"the precision of a factor must not be negative (E-N5), got {least:.3g}"

    def bounds(
        self, state: State, client: int, update: Update, limits: Any, training: Any
    ) -> str | None:
        """Return why the client's new factor says more of z than a client may, or None."""
        new = self.factor(state, client, int(update.turns), update.change)
        for what, values in new._asdict().items():
            if (largest := float(values.abs().max())) > limits.max_precision:
                return (
                    f"the {what} of a factor must be at most max_precision = "
                    f"{limits.max_precision:g}, got {largest:.3g}"
                )
        return None

    def factor(self, state: State, client: int, turns: int, change: Diagonal) -> Diagonal:
        """Return the client's new factor: the ledger's, if it has one, times the change."""
        if turns <= 0 or not self.known(state, client, turns):
            return change
        return product(entry(state.ledger, client), change)

    def known(self, state: State, client: int, turns: int) -> bool:
        """Return whether the factor that a client changed is the ledger's, or none at all."""
        noted = state.ledger.get(f"{client}/turns")
        return turns <= 0 or (noted is not None and int(noted) == turns)

    def statistic(self, state: State, client: int, update: Update) -> Statistic:
        """Return (n_k, n_k theta_k), the client's new line in the ledger, and whether the old one
        cannot be what it changed.
        """
        one = Diagonal(*(value[None] for value in update.change))
        return {**self.averages(update), **self.lines(state, (client,), update.turns[None], one)}

    def averages(self, update: Update) -> Statistic:
        """Return (n_k, n_k theta_k)."""
        number, groups = update.num_examples, (update.params, update.buffers, update.extra)
        parts = [weighted(name, group, number) for name, group in zip(GROUPS, groups, strict=True)]
        return {"num_examples": number, **parts[0], **parts[1], **parts[2]}

    def summand(self, state: State, client: int, update: Update) -> Statistic:
        """Return (n_k, n_k theta_k), the change of the factor, and whether a factor was lost."""
        return {
            **self.averages(update),
            "change/precision": on_grid(update.change.precision),
            "change/shift": on_grid(update.change.shift),
            "reset": (update.turns < 0).long(),
        }

    def lines(
        self, state: State, clients: tuple[int, ...], turns: Tensor, change: Diagonal
    ) -> Tensors:
        """Return the clients' part of a statistic: their factors and turns by name, and in `reset`
        how many cannot go on, so that all must start anew. This does not wait for a GPU.
        """

        def noted(name: str, none: Tensor) -> Tensor:
            return torch.stack([state.ledger.get(f"{client}/{name}", none) for client in clients])

        zero = torch.zeros_like(change.precision[0])
        known = (turns <= 0) | (noted("turns", torch.full_like(turns[0], -1)) == turns)
        old = Diagonal(noted("precision", zero), noted("shift", zero))
        new = choose(known & (turns > 0), product(old, change), change)
        columns = {**new._asdict(), "turns": turns.clamp(min=0) + 1}
        rows = {name: column.unbind() for name, column in columns.items()}
        return {
            **{f"ledger/{c}/{n}": rows[n][row] for row, c in enumerate(clients) for n in rows},
            "reset": (~known).sum(),
        }

    def total(self, state: State, clients: tuple[int, ...], updates: Update) -> Sum:
        """Return the same sums over stacked updates."""
        weight = updates.num_examples.double()
        found: dict[str, Tensor] = {
            "num_examples": updates.num_examples.sum(),
            **summed("params", updates.params, weight),
            **summed("buffers", updates.buffers, weight),
            **summed("extra", updates.extra, weight),
        }
        return {**found, **self.lines(state, clients, updates.turns, updates.change)}

    def finalise(self, state: State, total: Sum) -> State:
        """Return the average [eq. 3] and the product of prior and factors [eq. 4]; no reply leaves
        the state as it was.
        """
        if "num_examples" not in total:
            return state
        weight = total["num_examples"]
        params, buffers, extra = (averaged(g, getattr(state, g), total, weight) for g in GROUPS)
        after = state._replace(params=params, buffers=buffers, extra=extra)
        if not holds(total["reset"] == 0):
            return anew(after)
        if "change/precision" in total:  # a secure sum
            change = Diagonal(total["change/precision"], total["change/shift"])
            change = Diagonal(*(value.to(state.total.precision) for value in change))
            return after._replace(ledger={}, total=product(state.total, change))
        lines = {
            name.removeprefix("ledger/"): value.to(state.epoch.device)
            for name, value in total.items()
            if name.startswith("ledger/")
        }
        return settled(after._replace(ledger={**state.ledger, **lines}))

    def forget(self, state: State, client: int) -> State:
        """Return the state without the factor of a client that left."""
        if unlisted(state):
            return anew(state)
        return settled(
            state._replace(
                ledger={n: v for n, v in state.ledger.items() if n.split("/")[0] != str(client)}
            )
        )

    def report(self, state: State) -> dict[str, float]:
        """Return how many clients have a factor, how precise z has become, and how often factors
        started anew.
        """
        listed = {} if unlisted(state) else {"factors": len(state.ledger) / 3}
        return {
            **listed,
            "latent_precision": float(state.total.precision.mean()),
            "resets": float(state.epoch),
        }

    def pictures(self, state: State) -> tuple[Picture, ...]:
        """Return the belief about z at the end: mean and two standard deviations of each
        coordinate.
        """
        precision = state.total.precision.double().reshape(-1)
        mean, spread = state.total.shift.double().reshape(-1) / precision, 2 / precision.sqrt()
        pairs = list(zip(mean.tolist(), spread.tolist(), strict=True))[:SHOWN]
        marks = tuple(Mark(f"z[{i}]", m - s, m, m + s) for i, (m, s) in enumerate(pairs))
        words = "The product of all clients' factors and the prior."
        axes = ("coordinate of z", "mean ± 2 sd")
        return (Picture("The latent belief at the end", words, *axes, marks),)


def classifier(params: Tensors, head: frozenset[str]) -> str:
    """Return the name of the classifier's weights (C, F): the head must be one linear layer."""
    found = [name for name in sorted(head) if params[name].ndim == 2]
    if len(found) != 1:
        raise ConfigError(
            f"FedNP needs a head with one weight matrix, got {len(found)} in {sorted(head)}; name "
            "a linear layer as head"
        )
    return found[0]


def anew(state: State) -> State:
    """Return the state without any factor."""
    return settled(state._replace(ledger={}, epoch=state.epoch + 1))


def settled(state: State) -> State:
    """Return the state with total = prior × all factors in the ledger [eq. 4]."""
    old = state.total.precision
    ledger, total = multiplied(state.ledger, old.shape[0], old.device)
    return state._replace(ledger=ledger, total=total)


def unlisted(state: State) -> bool:
    """Return whether the total has factors that no ledger lists: sums are secure."""
    return not state.ledger and bool((state.total.precision != 1).any())
