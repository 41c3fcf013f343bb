"""What a server believes of each client's dropout: log alpha from a hypernetwork, one for all, or
one a client.

    posterior    psi              embeddings
    hyper        hypernetwork     client → its embedding (MetaVD)
    global       {}               "all" → log alpha of every client (VD)
    own          {}               client → its log alpha (EnsembleVD)

Clients say by how much their log alpha moved, and the belief follows. Everything is keyed by the
client's number, never by its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..stacked.recorded import kept, recorded
from ..tree import Tensors, digest, recast
from . import dropout, hypernet
from .guesses import holds

ALL = "all"


class Belief(NamedTuple):
    """The hypernetwork, what is kept for each client, both momenta, and in how many rounds each
    client took part.
    """

    psi: Tensors
    psi_velocity: Tensors
    embeddings: Tensors
    embedding_velocity: Tensors
    seen: Tensors


def begin(config: Any, seed: str, weight: Tensor, clients: tuple[int, ...]) -> Belief:
    """Return the belief before the first round; it follows from the seed, an embedding also from
    its client's number.
    """
    start, psi = torch.full_like(weight, config.log_alpha_start).reshape(-1), {}
    embeddings = {str(client): start for client in clients}
    if config.posterior == "hyper":
        size = 1 + len(clients) // 4
        psi = hypernet.initial(seed, size, config.hyper_width, weight.numel(), weight.dtype)
        embeddings = {
            str(client): hypernet.embedding(seed, client, size, weight.dtype) for client in clients
        }
    elif config.posterior == "global":
        embeddings = {ALL: start}
    return Belief(
        psi,
        {},
        embeddings,
        {},
        {str(client): torch.zeros((), dtype=torch.int64) for client in clients},
    )


class Admitting:
    """The part of a server half that takes a late client into the belief in its state."""

    config: Any

    def admit(self, state: Any, client: int) -> Any:
        """Return the state with a belief about a client that comes in the middle of a run."""
        return state._replace(belief=admitted(self.config, state.belief, client))


def admitted(config: Any, belief: Belief, client: int) -> Belief:
    """Return the belief with one client more: an embedding drawn as at the start, seeded by the
    hypernetwork as it is now; log alpha at its start where there is no hypernetwork. A client that
    is known keeps what is believed of it, for its return.
    """
    name, some = str(client), next(iter(belief.embeddings.values()))
    if name in belief.seen:
        return belief
    seen = {**belief.seen, name: torch.zeros((), dtype=torch.int64)}
    if config.posterior == "global":
        return belief._replace(seen=seen)
    own = torch.full_like(some, config.log_alpha_start)
    if config.posterior == "hyper":
        own = hypernet.embedding(digest(belief.psi), client, some.numel(), some.dtype)
    return belief._replace(embeddings={**belief.embeddings, name: own}, seen=seen)


def log_alpha(config: Any, belief: Belief, client: int, size: int) -> Tensor:
    """Return log alpha of a client (K,); of one that never trained, that of the mean of the
    trained, or nearly no dropout.
    """
    known = belief.embeddings
    if config.posterior == "global":
        own = known[ALL]
    elif str(client) in known:
        own = known[str(client)]
    elif config.ood == "deterministic":
        return next(iter(known.values())).new_full((size,), -dropout.LIMIT)
    else:
        names = sorted(known, key=int)
        trained = [name for name in names if int(belief.seen[name]) > 0] or names
        own = torch.stack([known[name] for name in trained]).mean(0)
    return dropout.limited(
        config.log_alpha_start + hypernet.output(belief.psi, own) if belief.psi else own
    )


def log_alphas(config: Any, belief: Belief, clients: Sequence[int], size: int) -> Tensor:
    """Return log alpha of clients (M, K): on a GPU by one pass of the hypernetwork, whose last bits
    may differ from those of `log_alpha`.
    """
    known = [belief.embeddings.get(str(client)) for client in clients]
    some = [one for one in known if one is not None]
    if belief.psi and some and some[0].is_cuda and len(some) == len(known):
        moved = hypernet.output(belief.psi, torch.stack(some))
        return dropout.limited(config.log_alpha_start + moved)
    return torch.stack([log_alpha(config, belief, client, size) for client in clients])


def line(client: int, number: Tensor, step: Tensor) -> Tensors:
    """Return what a sum keeps of a client by name: n and its step of log alpha."""
    return {f"number/{client}": number, f"step/{client}": step.double()}


def after(config: Any, belief: Belief, total: Mapping[str, Tensor]) -> Belief:
    """Return the belief after a sum with a `line` of each client, or with Σ n step of all in
    "step/all" (secure sums, one log alpha for all clients).
    """
    whole = total["num_examples"]
    if f"step/{ALL}" in total:
        return moved_together(config, belief, total[f"step/{ALL}"].reshape(-1) / whole)
    clients = sorted(int(name.partition("/")[2]) for name in total if name.startswith("number/"))
    moved = torch.stack([total[f"step/{client}"].reshape(-1) for client in clients])
    number = torch.stack([total[f"number/{client}"] for client in clients])
    return followed(config, belief, clients, moved.double(), number.double() / whole)


def followed(
    config: Any, belief: Belief, clients: Sequence[int], moved: Tensor, share: Tensor
) -> Belief:
    """Return the belief after clients, in the order of their numbers, moved their log alpha by
    `moved` (M, K); `share` (M,) are their g^m. Both are in float64. The rate is the server's.
    """
    names = [str(client) for client in clients]
    known = [name for name in names if name in belief.seen]
    if known:
        counts = torch._foreach_add([belief.seen[name] for name in known], 1)
        belief = belief._replace(seen={**belief.seen, **dict(zip(known, counts, strict=True))})
    if config.posterior == "hyper":
        return climbed(config, belief, names, moved, share)
    if config.posterior == "global":
        return moved_together(config, belief, (share[:, None] * moved).sum(0))
    own = torch.stack([belief.embeddings[name] for name in names])
    after = dropout.limited(own.double() + config.server_lr * moved).to(own.dtype)
    now = dict(zip(names, hypernet.separated(after), strict=True))
    return belief._replace(embeddings={**belief.embeddings, **now})


def climbed(
    config: Any, belief: Belief, names: Sequence[str], moved: Tensor, share: Tensor
) -> Belief:
    """Return the belief after a step of the hypernetwork and of the embeddings of clients `names`,
    as far as the reach allows.
    """
    own = torch.stack([belief.embeddings[name] for name in names])
    rest = torch.zeros_like(own[0])
    going = torch.stack([belief.embedding_velocity.get(name, rest) for name in names])
    pace = hypernet.Pace(
        config.server_lr,
        config.hyper_momentum,
        config.embedding_momentum,
        config.hyper_decay,
        config.hyper_clip,
        config.hyper_reach,
    )
    before = {**{name: belief.psi[name] for name in hypernet.PSI}, hypernet.OWN: own}
    still = belief.psi_velocity or {key: torch.zeros_like(one) for key, one in belief.psi.items()}
    # some hundred small kernels on a GPU
    numbers = (*before.values(), *(still[name] for name in hypernet.PSI), going, moved, share)
    found, speed, taken = recorded(hypernet.flat_step, numbers, pace)
    after, velocity = (
        dict(zip(hypernet.NAMES, kept(some), strict=True)) for some in (found, speed)
    )
    if not holds(taken > 0):
        part = hypernet.within(pace.reach, before, after)
        after = recast(hypernet.between(part, before, after), before)
        velocity = {name: part * value for name, value in velocity.items()}
    rows, speeds = (
        dict(zip(names, hypernet.separated(some.pop(hypernet.OWN)), strict=True))
        for some in (after, velocity)
    )
    known = belief.embedding_velocity
    return belief._replace(
        psi=after,
        psi_velocity=velocity if pace.momentum else {},
        embeddings={**belief.embeddings, **rows},
        embedding_velocity={**known, **speeds} if pace.own_momentum else known,
    )


def moved_together(config: Any, belief: Belief, step: Tensor) -> Belief:
    """Return the belief in one log alpha for all clients after their mean step."""
    old = belief.embeddings[ALL]
    after = dropout.limited(old.double() + config.server_lr * step.to(old.device)).to(old.dtype)
    return belief._replace(embeddings={ALL: after})
