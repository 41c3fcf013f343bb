"""What a server believes of dropout follows what clients say, and no further than it should; so
MetaVD's defaults learn.
"""

from __future__ import annotations

import pytest
import torch
from vdplain import BASES, server

from bayflower.config import parse
from bayflower.engines import execute, prepare
from bayflower.maths import beliefs
from bayflower.metrics import summarise


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_the_defaults_learn_as_their_base_does(base):
    """Digits, every setting as it comes, 8 rounds: the hypernetwork once drove alpha to its limits
    in two rounds, and all was chance.
    """
    bare, with_dropout = (
        execute(
            prepare(
                parse(
                    method,
                    {
                        "rounds": 8,
                        "device": "cpu",
                        "evaluate_every": 0,
                        "calibration": "off",
                        "stacking": "yes",
                        **settings,
                    },
                )
            )
        )
        for method, settings in ((base, {}), ("metavd", {"base": base}))
    )
    accuracy = [
        summarise(outcome.views["personal"])["accuracy"] for outcome in (bare, with_dropout)
    ]
    assert accuracy[0] > 0.3  # of ten classes
    assert accuracy[1] > accuracy[0] - 0.05
    assert 0.05 < with_dropout.rounds[-1]["dropout_rate"] < 0.2


def test_a_step_that_reaches_too_far_is_taken_in_part():
    """Belief and velocity go the same share of the way; log alpha of each client moves by no more
    than the reach, up to the mean.
    """
    half, far = server(hyper_reach=0.1), server(hyper_reach=0)
    start = {
        "w.weight": torch.randn(8, 64, generator=torch.Generator().manual_seed(0)),
        "head.weight": torch.zeros(1, 1),
    }
    state = half.init(start, {}, (0, 1, 2))
    steps = {c: torch.full((512,), 0.05) for c in (0, 2)}
    shares = {0: torch.tensor(0.25), 2: torch.tensor(0.75)}
    near, wide = (beliefs.followed(one.config, state.belief, steps, shares) for one in (half, far))
    part = (near.psi["2.bias"] / wide.psi["2.bias"]).mean()  # of a bias that began at 0
    assert float(part) in (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128)
    for name in ("psi", "embeddings"):
        before, cut, whole = (getattr(one, name) for one in (state.belief, near, wide))
        for key, value in before.items():
            torch.testing.assert_close(
                cut[key] - value, part * (whole[key] - value), rtol=1e-3, atol=1e-6
            )
    for name in ("psi_velocity", "embedding_velocity"):
        for key, value in getattr(wide, name).items():
            torch.testing.assert_close(getattr(near, name)[key], part * value)
    moved = torch.stack(
        [half.log_alpha(state._replace(belief=near), c) - half.log_alpha(state, c) for c in (0, 2)]
    )
    assert 0.02 < float(moved.square().mean().sqrt()) <= 0.1
