"""Which step sees which samples (batches) and which noise, each against an oracle."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayflower.contract import Phase
from bayflower.data import largest_batch, noise, num_steps, plan, rng
from bayflower.data.batches import layout, noise_key, normal, table
from bayflower.errors import BayflowerError, ConfigError


# -- batches and noise ---------------------------------------------------------------------------
def phase_of(name: str = "local", batch_size: int = 10, **lengths: int) -> Phase:
    """Return a phase without an optimiser, which batches do not look at."""
    return Phase(name, None, batch_size, **lengths)  # type: ignore[arg-type]


phases = st.builds(
    lambda size, count, mode, batches: phase_of(batch_size=size, batches=batches, **{mode: count}),
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from(["epochs", "steps"]),
    st.integers(1, 3),
)


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 40), phase=phases, coupled=st.booleans(), seed=st.integers(0, 1000))
def test_plan(n: int, phase: Phase, coupled: bool, seed: int) -> None:
    keys: dict[str, Any] = {
        "seed": seed,
        "client": 3,
        "round": 7,
        "purpose": "train",
        "coupled": coupled,
    }
    if coupled and (n == 1 or phase.batch_size == 1):
        with pytest.raises(BayflowerError, match="BatchNorm"):
            plan(n, phase, **keys)
        return
    groups = plan(n, phase, **keys)
    assert len(groups) == num_steps(n, phase, coupled)
    assert all(len(group) == phase.batches for group in groups)
    sizes: list[int] = []  # the slow way: fill batches one sample at a time
    for sample in range(n):
        if sample % phase.batch_size == 0 and not (coupled and sample == n - 1):
            sizes.append(0)
        sizes[-1] += 1
    per_epoch = len(sizes)
    stream = [batch for group in groups for batch in group]
    if phase.epochs:
        assert -(-phase.epochs * per_epoch // phase.batches) * phase.batches == len(stream)
        assert 0 <= len(stream) - phase.epochs * per_epoch < phase.batches
    else:
        assert len(groups) == phase.steps
    assert max(sizes) == largest_batch(n, phase, coupled)
    for number, batch in enumerate(stream):
        assert len(batch) == sizes[number % per_epoch]
    for start in range(0, len(stream) - per_epoch + 1, per_epoch):
        # an epoch is a permutation
        assert sorted(np.concatenate(stream[start : start + per_epoch])) == list(range(n))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(stream, (b for g in plan(n, phase, **keys) for b in g), strict=True)
    )


def test_plan_keys_and_prefix() -> None:
    keys: dict[str, Any] = {
        "seed": 1,
        "client": 2,
        "round": 3,
        "purpose": "train",
        "coupled": False,
    }
    first = np.concatenate([group[0] for group in plan(50, phase_of(epochs=2), **keys)])
    assert not np.array_equal(first[:50], first[50:])  # each epoch its own shuffle
    for change in ({"seed": 2}, {"client": 3}, {"round": 4}, {"purpose": "adapt"}):
        other = np.concatenate(
            [group[0] for group in plan(50, phase_of(epochs=2), **{**keys, **change})]
        )
        assert not np.array_equal(first, other), change
    other = np.concatenate([group[0] for group in plan(50, phase_of("head", epochs=2), **keys)])
    assert not np.array_equal(first, other)
    longer = np.concatenate([group[0] for group in plan(50, phase_of(steps=17), **keys)])
    assert np.array_equal(first, longer[:100])


def test_plan_refuses() -> None:
    keys: dict[str, Any] = {
        "seed": 1,
        "client": 2,
        "round": 3,
        "purpose": "train",
        "coupled": False,
    }
    with pytest.raises(BayflowerError, match="at least 1 training sample, got 0"):
        plan(0, phase_of(epochs=1), **keys)
    with pytest.raises(
        ConfigError,
        match="exactly one of epochs and steps must be positive in phase 'local', got 1 and 1",
    ):
        plan(5, phase_of(epochs=1, steps=1), **keys)
    with pytest.raises(ConfigError, match="seed must be in"):
        rng(-1, "p")


def test_noise() -> None:
    keys: dict[str, Any] = {"seed": 1, "client": 2, "round": 3, "stage": "train/local", "step": 4}
    drawn = noise({"a": (200, 50), "b": (3,)}, **keys, dtype=torch.float64)
    assert drawn["a"].shape == (200, 50)
    assert drawn["b"].dtype == torch.float64
    assert abs(drawn["a"].mean()) < 0.05
    assert drawn["a"].std() == pytest.approx(1, abs=0.03)
    alone = noise({"b": (3,)}, **keys, dtype=torch.float32)["b"]
    assert torch.equal(alone, drawn["b"].float())  # neither other names nor the precision matter
    for change in ({"seed": 2}, {"client": 3}, {"round": 4}, {"stage": "predict"}, {"step": 5}):
        assert not torch.equal(
            noise({"b": (3,)}, **{**keys, **change}, dtype=torch.float32)["b"], alone
        ), change


def test_generator_is_pinned() -> None:
    # Golden: results on disk depend on these bits. Philox of SeedSequence([seed, crc32(stream),
    # keys]).
    expected = np.random.Generator(
        np.random.Philox(np.random.SeedSequence([9, crc32(b"split"), 4]))
    )
    assert np.array_equal(rng(9, "split", 4).integers(0, 2**60, 8), expected.integers(0, 2**60, 8))


@pytest.mark.parametrize("coupled", [False, True])
def test_the_table_of_many_clients_is_their_plans(coupled: bool) -> None:
    for sizes, clients in (([23, 16, 9, 7, 2], [4, 0, 3, 9, 1]), ([5, 3], [1, 0])):
        check_table(sizes, clients, coupled)


def check_table(sizes: list[int], clients: list[int], coupled: bool) -> None:
    lengths = ({"epochs": 2}, {"steps": 5, "batches": 2}, {"epochs": 3, "batches": 2})
    for phase in (phase_of(batch_size=8, **length) for length in lengths):
        steps = max(num_steps(size, phase, coupled) for size in sizes)
        width = max(largest_batch(size, phase, coupled) for size in sizes)
        known = layout(sizes, phase, coupled=coupled, steps=steps, width=width)
        rows = table(known, clients, phase.name, seed=3, round=2, purpose="train")
        for place, (size, client) in enumerate(zip(sizes, clients, strict=True)):
            want = plan(
                size, phase, seed=3, client=client, round=2, purpose="train", coupled=coupled
            )
            got = [tuple(row[row >= 0] for row in groups) for groups in rows[: len(want), place]]
            assert all(
                np.array_equal(a, b)
                for one, two in zip(got, want, strict=True)
                for a, b in zip(one, two, strict=True)
            )
            assert (rows[len(want) :, place] == -1).all()


def test_noise_is_normal_and_the_same_for_one_client_or_many() -> None:
    from scipy import stats

    keys = torch.tensor([noise_key(0, "train/local", "eps", client, 3) for client in range(40)])
    drawn = normal(keys, torch.tensor(5), (50, 40))
    flat = drawn.flatten().numpy()
    assert stats.kstest(flat, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(drawn.reshape(40, -1).numpy()) - np.eye(40)).max() < 0.12
    assert (
        abs(
            np.corrcoef(
                drawn[0, :, 0].numpy(), normal(keys, torch.tensor(6), (50, 40))[0, :, 0].numpy()
            )[0, 1]
        )
        < 0.6
    )
    alone = noise(
        {"eps": (50, 40)},
        seed=0,
        client=7,
        round=3,
        stage="train/local",
        step=5,
        dtype=torch.float64,
    )["eps"]
    assert torch.equal(alone, drawn[7])
