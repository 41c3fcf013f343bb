"""The privacy budget of a run under Flower: who is asked in a round, and which half adds noise."""

from __future__ import annotations

import json
from typing import Any

from ..contract import ServerHalf
from ..errors import ConfigError
from ..methods import Method
from ..networks.model import Anatomy
from ..privacy.budget import Budget
from ..recipes.secrecy import Privacy

ALONE = "dp needs start() of the strategy itself; call that, without a wrapper"


def check(privacy: Privacy, hooked: bool) -> None:
    """Raise if an overridden hook could change what is sent or summed."""
    if hooked and (privacy.on or privacy.hides_clients):
        name = "secure=sum" if privacy.on else f"dp={privacy.dp}"
        raise ConfigError(
            f"{name} makes and reads the messages of a round itself; remove the overridden "
            "configure_train and aggregate_train"
        )


def made(
    budget: Budget | None, row: Method, options: Any, anatomy: Anatomy, members: int
) -> ServerHalf:
    """Return a method's server half, with private sums if there is a budget."""
    half = row.server(options, anatomy)
    return budget.server_half(half, members) if budget else half


def sampled(
    budget: Budget | None, half: Any, round: int, members: list[int], usual: list[int]
) -> list[int]:
    """Return the clients of a round, and count the round."""
    if budget is None:
        return usual
    if budget.privacy.hides_clients:
        half.mechanism = budget.mechanism(budget.fraction * len(members))
    chosen = budget.choose(round, members, usual)
    budget.spend(chosen)
    return chosen


def shown(budget: Budget | None) -> dict[str, float]:
    """Return what a round's record shows of the budget."""
    return budget.shown() if budget else {}


def memory(budget: Budget | None) -> dict[str, Any]:
    """Return what a resumed run needs to know of the budget."""
    return budget.memory() if budget else {}


def told(budget: Budget | None) -> dict[str, str]:
    """Return what clients are told with a test, for the cards of their models."""
    return {"privacy": json.dumps(budget.report())} if budget else {}


def ended(budget: Budget | None) -> dict[str, Any]:
    """Return what the outcome of a run says of the budget."""
    if budget is None:
        return {}
    return {"privacy": budget.report(), "remarks": (budget.remark(),)}
