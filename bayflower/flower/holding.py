"""Which samples the clients of a user's own Flower app hold out for calibration. The strategy says
it: queries and requests carry a `Rule` in their header. Without one nothing is held out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data import DataSettings, hold_out, rng
from ..data.settings import CALIBRATION_SETTINGS
from ..errors import ConfigError, WireError
from ..networks.model import Batch

log = logging.getLogger("bayflower")
HOLD = "hold"  # the key in a header
INSIDE = (
    "calibration is off inside another strategy, which has no requests for it: no samples are held "
    "out; call start() of the strategy itself to calibrate personal models"
)


class Rule(NamedTuple):
    """Which of their own training samples the clients of a user's app hold out."""

    share: float
    rows: int  # at most
    seed: int

    def told(self) -> dict[str, Any]:
        """Return the rule for a message's header."""
        return {HOLD: json.dumps(self)}

    @classmethod
    def read(cls, head: Mapping[str, Any]) -> Rule | None:
        """Return the rule in a header; None if nothing is held out, raise if it is no rule."""
        if HOLD not in head:
            return None
        try:
            share, rows, seed = json.loads(head[HOLD])
            DataSettings(calibration_share=share, calibration_rows=rows)
            return cls(float(share), rows, int(seed))
        except (TypeError, ValueError, ConfigError) as error:
            raise WireError(f"the rule of held-out samples cannot be read: {error}") from None

    def split(self, train: Batch, client: int) -> tuple[Batch, Batch | None]:
        """Return a client's samples as (training, held out), each in the order they came in."""
        order = rng(self.seed, "hold", client).permutation(len(train.y))
        parts = (np.sort(part) for part in hold_out(order, self.share, self.rows))
        left, held = (
            Batch(*(tensor[torch.as_tensor(part, device=tensor.device)] for tensor in train))
            for part in parts
        )
        return left, held if len(held.y) else None

    def capped(self, held: Batch, client: int) -> Batch | None:
        """Return the samples that a user holds out; of too many, `rows` drawn at random."""
        if len(held.y) <= self.rows:
            return held if len(held.y) else None
        log.warning(
            "client %d: %d of its %d calibration samples are used; raise calibration_rows for more",
            *(client, self.rows, len(held.y)),
        )
        order = rng(self.seed, "hold", client).permutation(len(held.y))[: self.rows]
        rows = torch.as_tensor(np.sort(order), device=held.y.device)
        return Batch(*(tensor[rows] for tensor in held))


def asked_for(
    settings: dict[str, Any], how: str, asks_at_end: bool, seed: int
) -> tuple[DataSettings, dict[str, Any]]:
    """Return what a strategy's arguments say of calibration, and what its clients are told of it;
    take these arguments out of `settings`. `asks_at_end` says that clients get a request after the
    last round.
    """
    found = {name: settings.pop(name) for name in CALIBRATION_SETTINGS if name in settings}
    data = DataSettings(calibration=how, **found)
    if data.calibrated and not asks_at_end:
        raise ConfigError(
            "calibration needs a request to the clients after the last round; set "
            "keep_personal=True or fraction_evaluate above 0, or calibration='off'"
        )
    rule = Rule(data.calibration_share, data.calibration_rows, seed)
    return data, rule.told() if data.calibrated else {}
