"""FedPAC, server half (Xu, Tong and Huang 2023, ICLR): an averaged base, class prototypes, and for
each client a mixture of all clients' heads.

    paper          here                  shape
    theta          state.params          by name: the base
    c_c            state.centroids       (K, D): class prototypes
    phi_i          state.heads           "i:name": the mixed head of client i
    h_i            h/i                   (K, D): p_c × mean feature of class c, at the received base
    V_i            var/i                 (): variance of h_i, summed over coordinates
    alpha_ij       (in mixture)          (m, m)

    alpha_i = argmin over the simplex of Σ_j alpha_j² V_j + ‖h_i − Σ_j alpha_j h_j‖²        [eq. 8]
    phi_i = Σ_j alpha_ij phi_j over the clients of the round                                [eq. 9]

With G_jl = ⟨h_j, h_l⟩ the objective is Σ alpha_j² V_j + alphaᵀG alpha − 2 alphaᵀG_i: all clients'
weights are found at once by accelerated projected gradients in float64.

Heads and statistics of features travel by client, so their sum is a union: a secure sum cannot hide
them, and the server holds one head a client.

Departs: V has the divisor n − 1, as an unbiased variance; with the paper's n a client of one sample
has V = 0 and is trusted most (`pac_variance=printed`). A client of one sample is in no mixture but
its own. Weights up to `pac_cut` are 0 and the rest sums to 1 again. A client that was not in the
round keeps its mixed head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import ServerHalf, Statistic, Sum
from ..errors import ConfigError, check_choices
from ..networks.model import Anatomy
from ..settings import setting
from ..shown import Heading
from ..tree import Tensors
from . import fedper

Variance = Literal["unbiased", "printed"]
MOST = 5000  # iterations
FEW = 256  # mixtures of so many clients are solved on the CPU: a GPU waits after each small step
NEAR = 1e-12  # change of a weight at which they end


@dataclass(frozen=True)
class Config:
    """What the user sets for FedPAC."""

    pac_weight: float = setting(1.0, "weight of the pull of features to the prototypes")
    pac_head_epochs: int = setting(1, "epochs on the head alone, before those on the base")
    pac_head_lr: float = setting(
        0.0, "learning rate of the head's epochs; 0 = that of the run (the authors: 0.1 with SGD)"
    )
    pac_cut: float = setting(1e-3, "heads with a weight up to this are left out of a mixture")
    pac_mix: bool = setting(True, "whether heads are mixed; no = every client keeps its own")
    pac_variance: Variance = setting(
        "unbiased", "divisor of the variance: unbiased = n − 1; printed = n, as in the paper"
    )
    min_count: int = setting(
        5,
        "a client sends nothing about a class with fewer samples; with 1 sample it would send that "
        "sample's feature itself",
    )

    def __post_init__(self) -> None:
        for name in ("pac_weight", "pac_head_lr"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}"
                )
        if not 0 <= self.pac_cut < 1:
            raise ConfigError(f"pac_cut must be in [0, 1), got {self.pac_cut}")
        for name in ("min_count", "pac_head_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_choices(self)


class State(NamedTuple):
    """Base, prototypes, and the clients' mixed heads."""

    params: Tensors
    buffers: Tensors
    centroids: Tensor  # (K, D), 0 where not known
    known: Tensor  # (K,) bool
    start: Tensors  # the initial head
    heads: Tensors  # "i:name"


class Broadcast(NamedTuple):
    """What a client is sent: base and prototypes, and its own mixed head."""

    params: Tensors
    buffers: Tensors
    centroids: Tensor
    known: Tensor
    head: Tensors
    mixed: Tensor  # bool: the head is a mixture for this client


class Update(NamedTuple):
    """What a client sends. `seen` has "h" (K, D) and "variance" (), of the received base; without
    mixtures it and `head` are empty.
    """

    num_examples: Tensor
    params: Tensors
    buffers: Tensors
    counts: Tensor  # (K,) int64, 0 for classes that are not sent
    means: Tensor  # (K, D)
    head: Tensors
    seen: Tensors


class Server(ServerHalf):
    """Averages base and prototypes, and mixes heads."""

    state_type = State
    broadcast_type = Broadcast
    per_client: ClassVar[bool] = True
    headings = {
        "mixed_heads": Heading(
            "Clients with a mixed head", "clients", "Clients for which the server holds a head."
        )
    }

    def __init__(self, config: Config, anatomy: Anatomy) -> None:
        super().__init__(config, anatomy)
        self.base = fedper.Server(config, anatomy)

    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> State:
        """Return the initial base, no prototype and no mixture."""
        start = {n: params[n] for n in self.anatomy.trainable if n in self.anatomy.head_names}
        matrices = [value for value in start.values() if value.ndim == 2]
        if not matrices:
            raise ConfigError(
                "class prototypes need a head with a weight matrix, to know the features; name it, "
                "e.g. head='classifier'"
            )
        classes, dim = max(matrices[-1].shape[0], 2), matrices[0].shape[1]
        base = self.base.init(params, buffers, clients)
        known = torch.zeros(classes, dtype=torch.bool, device=matrices[0].device)
        centroids = matrices[0].new_zeros(classes, dim)
        return State(base.params, base.buffers, centroids, known, start, {})

    def broadcast(self, state: State, client: int) -> Broadcast:
        """Return base and prototypes, and the client's mixed head if it has one."""
        head = {n: state.heads.get(f"{client}:{n}", value) for n, value in state.start.items()}
        mixed = torch.full_like(state.known[0], self.mixed(state, client))
        return Broadcast(state.params, state.buffers, state.centroids, state.known, head, mixed)

    def mixed(self, state: State, client: int) -> bool:
        """Return whether the server holds a mixed head for a client."""
        return all(f"{client}:{name}" in state.heads for name in state.start)

    def shared(self, state: State) -> Tensors:
        """Return the base."""
        return self.base.shared(state)  # type: ignore[arg-type]

    def expects(self, state: State) -> Update:
        """Return the shape of an update."""
        counts = torch.zeros(len(state.known), dtype=torch.int64)
        seen = {"h": state.centroids, "variance": state.centroids.new_zeros(())}
        head, seen = (state.start, seen) if self.config.pac_mix else ({}, {})
        return Update(counts[0], state.params, state.buffers, counts, state.centroids, head, seen)

    def check(self, state: State, client: int, update: Update) -> str | None:
        """Return why the update cannot be used, or None."""
        counted, number = int(update.counts.sum()), int(update.num_examples)
        if int(update.counts.min()) < 0 or counted > number:
            return f"the classes have {counted} samples, more than num_examples = {number}"
        if update.seen and float(update.seen["variance"]) < 0:
            return f"a variance must not be negative, got {float(update.seen['variance']):.3g}"
        return self.base.check(state, client, update)  # type: ignore[arg-type]

    def statistic(self, state: State, client: int, update: Update) -> Statistic:
        """Return (n, n θ), (Z, Z × mean) of the classes that were sent, and by the client's number
        its head, h and V.
        """
        found: dict[str, Any] = dict(self.base.statistic(state, client, update))  # type: ignore[arg-type]
        for k in update.counts.nonzero()[:, 0].tolist():
            found[f"count/{k}"] = update.counts[k]
            found[f"sum/{k}"] = update.counts[k].double() * update.means[k].double()
        return {**found, **self.line(client, update)}

    def line(self, client: int, update: Update) -> dict[str, Tensor]:
        """Return what is kept by the client's number."""
        if not update.seen:
            return {}
        return {
            f"size/{client}": update.num_examples,
            f"h/{client}": update.seen["h"],
            f"var/{client}": update.seen["variance"],
            **{f"head/{client}/{name}": value for name, value in update.head.items()},
        }

    def total(self, state: State, clients: tuple[int, ...], updates: Update) -> Sum:
        """Return the same sums over stacked updates."""
        found: dict[str, Tensor] = dict(self.base.total(state, clients, updates))  # type: ignore[arg-type]
        counts = updates.counts.sum(0)
        sums = (updates.counts.double()[..., None] * updates.means.double()).sum(0)
        for k in counts.nonzero()[:, 0].tolist():
            found |= {f"count/{k}": counts[k], f"sum/{k}": sums[k]}
        for place, client in enumerate(clients):
            one = updates._replace(
                num_examples=updates.num_examples[place],
                head={name: value[place] for name, value in updates.head.items()},
                seen={name: value[place] for name, value in updates.seen.items()},
            )
            found |= self.line(client, one)
        return found

    def finalise(self, state: State, total: Sum) -> State:
        """Return base, prototypes and mixed heads [eq. 9]; a class that nobody sent keeps its
        prototype. No reply leaves the state as it was.
        """
        if "num_examples" not in total:
            return state
        base = self.base.finalise(state, total)  # type: ignore[arg-type]
        centroids, known = state.centroids.clone(), state.known.clone()
        for k in range(len(known)):
            if f"count/{k}" in total:
                centroids[k] = (total[f"sum/{k}"] / total[f"count/{k}"]).to(centroids)
                known[k] = True
        return State(
            base.params,
            base.buffers,
            centroids,
            known,
            state.start,
            dict(sorted({**state.heads, **self.heads(state, total)}.items())),
        )

    def heads(self, state: State, total: Sum) -> Tensors:
        """Return the mixed heads of the round's clients [eq. 9]."""
        clients = sorted(int(name[2:]) for name in total if name.startswith("h/"))
        if not clients:
            return {}
        h = torch.stack([total[f"h/{k}"].double().flatten() for k in clients])
        variance = torch.stack([total[f"var/{k}"].double() for k in clients])
        number = torch.stack([total[f"size/{k}"].double() for k in clients])
        weights = self.weights(h, variance, number)
        found = {}
        for name, like in state.start.items():
            own = torch.stack([total[f"head/{k}/{name}"].double() for k in clients])
            for place, client in enumerate(clients):
                mixed = torch.tensordot(weights[place], own, 1)
                found[f"{client}:{name}"] = mixed.to(like)
        return found

    def weights(self, h: Tensor, variance: Tensor, number: Tensor) -> Tensor:
        """Return the weights of the mixtures, a row a client [eq. 8]."""
        alone = torch.zeros_like(number, dtype=torch.bool)
        if self.config.pac_variance == "unbiased":
            alone = number <= 1
            variance = variance * number / (number - 1).clamp(min=1)
        found = torch.eye(len(number), dtype=torch.float64, device=h.device)
        some = (~alone).nonzero()[:, 0]
        if len(some):
            gram, spread = h[some] @ h[some].mT, variance[some]
            where = "cpu" if len(some) <= FEW else h.device
            alpha = mixtures(gram.to(where), spread.to(where)).to(h.device)
            alpha = torch.where(alpha > self.config.pac_cut, alpha, torch.zeros_like(alpha))
            found[some[:, None], some[None]] = alpha / alpha.sum(1, keepdim=True)
        return found

    def report(self, state: State) -> dict[str, float]:
        """Return how many classes have a prototype, and how many clients have a mixed head."""
        names = {name.split(":")[0] for name in state.heads}
        return {"known_classes": float(state.known.sum()), "mixed_heads": float(len(names))}


def mixtures(gram: Tensor, variance: Tensor) -> Tensor:
    """Return all rows alpha_i that minimise Σ_j alpha_j² V_j + alphaᵀG alpha − 2 alphaᵀG_i over the
    simplex [eq. 8], by accelerated projected gradients that start anew when they overshoot.
    """
    largest = torch.linalg.eigvalsh(gram)[-1].clamp(min=0) + variance.max()
    step = 1 / (2 * largest.clamp(min=1e-300))
    point = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    ahead, speed = point, 1.0
    for _ in range(MOST):
        slope = 2 * (ahead * variance + ahead @ gram - gram)
        new = on_simplex(ahead - step * slope)
        change = new - point
        if float(change.abs().max()) < NEAR and speed > 1:
            return new
        if float(((ahead - new) * change).sum()) > 0:  # it overshoots
            ahead, speed = point, 1.0
            slope = 2 * (ahead * variance + ahead @ gram - gram)
            new = on_simplex(ahead - step * slope)
            change = new - point
            if float(change.abs().max()) < NEAR:
                return new
        faster = (1 + (1 + 4 * speed**2) ** 0.5) / 2
        ahead, speed, point = new + (speed - 1) / faster * change, faster, new
    return point


def on_simplex(rows: Tensor) -> Tensor:
    """Return the nearest rows with entries that are not negative and sum to 1."""
    ordered = rows.sort(dim=1, descending=True).values
    count = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=rows.device)
    level = (ordered.cumsum(1) - 1) / count
    last = ((ordered - level) > 0).sum(1, keepdim=True) - 1
    return (rows - level.gather(1, last)).clamp(min=0)
