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

from ..tree import Tensors, digest
from . import dropout, hypernet

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
    clients = [int(name.partition("/")[2]) for name in total if name.startswith("number/")]
    steps = {client: total[f"step/{client}"].reshape(-1) for client in clients}
    shares = {client: total[f"number/{client}"].double() / whole for client in clients}
    return followed(config, belief, steps, shares)


def followed(
    config: Any, belief: Belief, steps: Mapping[int, Tensor], shares: Mapping[int, Tensor]
) -> Belief:
    """Return the belief after clients moved their log alpha by `steps` (K,); `shares` are their
    g^m. The rate is the server's.
    """
    clients = sorted(steps)
    names = [str(client) for client in clients]
    moved = torch.stack([steps[client].double() for client in clients])
    share = torch.stack([shares[client].double() for client in clients])
    seen = {**belief.seen, **{name: belief.seen[name] + 1 for name in names if name in belief.seen}}
    if config.posterior == "hyper":
        own = {name: belief.embeddings[name] for name in names}
        to_psi, to_own = hypernet.ascent(belief.psi, torch.stack(list(own.values())), moved, share)
        common: dict[str, float] = {
            "rate": config.server_lr,
            "decay": config.hyper_decay,
            "clip": config.hyper_clip,
        }
        psi, psi_velocity = hypernet.stepped(
            belief.psi, to_psi, belief.psi_velocity, momentum=config.hyper_momentum, **common
        )
        now, velocity = hypernet.stepped(
            own,
            dict(zip(names, to_own.unbind(), strict=True)),
            belief.embedding_velocity,
            momentum=config.embedding_momentum,
            **common,
        )
        part = hypernet.within(config.hyper_reach, (belief.psi, own), (psi, now))
        # the velocity is that of the step that was taken, or the next one would make up for it
        if part < 1:
            psi, now = partly(part, belief.psi, psi), partly(part, own, now)
            psi_velocity, velocity = (
                {name: part * value for name, value in going.items()}
                for going in (psi_velocity, velocity)
            )
        return Belief(
            psi,
            psi_velocity,
            {**belief.embeddings, **now},
            {**belief.embedding_velocity, **velocity},
            seen,
        )
    if config.posterior == "global":
        return moved_together(config, belief, (share[:, None] * moved).sum(0))._replace(seen=seen)
    after = {
        name: dropout.limited(belief.embeddings[name].double() + config.server_lr * step).to(
            belief.embeddings[name].dtype
        )
        for name, step in zip(names, moved, strict=True)
    }
    return belief._replace(embeddings={**belief.embeddings, **after}, seen=seen)


def moved_together(config: Any, belief: Belief, step: Tensor) -> Belief:
    """Return the belief in one log alpha for all clients after their mean step."""
    old = belief.embeddings[ALL]
    after = dropout.limited(old.double() + config.server_lr * step.to(old.device)).to(old.dtype)
    return belief._replace(embeddings={ALL: after})


def partly(part: float, before: Tensors, after: Tensors) -> Tensors:
    """Return where `part` of the step from `before` to `after` leads, in the dtypes of `before`."""
    return {
        name: value.to(before[name].dtype)
        for name, value in hypernet.between(part, before, after).items()
    }
