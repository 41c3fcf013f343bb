"""FedBPS against golden vectors, a slow round in numpy, and the two methods it contains: FedAvg (p
= 0) and local training (p = 1).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, small, small_prepared
from rig import Rig, rewrite, set_value

from bayflower.clients.fedbps import Client
from bayflower.config import Training
from bayflower.errors import ConfigError, WireError
from bayflower.maths.bits import pack_bits, unpack_bits
from bayflower.maths.exact import Total
from bayflower.networks.papers import build
from bayflower.strategies.fedbps import Broadcast, Config, Server, State, Update, moments, top
from bayflower.tree import stack


def server(**config) -> Server:
    return Server(Config(**config), None)


def start(half: Server, centre: torch.Tensor) -> State:
    return half.init({"w": centre}, {}, ())


def updates(mu: torch.Tensor, variance: torch.Tensor, counts: list[int]) -> list[Update]:
    return [
        Update(torch.tensor(n), {"w": m}, {"w": v}, {})
        for n, m, v in zip(counts, mu, variance, strict=True)
    ]


def summed(half: Server, state: State, sent: list[Update]) -> dict[str, torch.Tensor]:
    total = Total()
    for client, update in enumerate(sent):
        total.add(half.statistic(state, client, update))
    return total.value()


def test_golden_aggregate(golden):
    """[eq. 2], the moments of [eq. 5], the mask of [eq. 3] and the client's step."""
    case = golden["fedbps_aggregate"]
    tensor = lambda key: torch.tensor(case[key], dtype=torch.float64)  # noqa: E731
    client = Client(Config(delta=case["delta"]), Training(), build("mlp", (4,), 2))
    variance = 1 / (tensor("fisher_sum") + client.precision(torch.tensor(7.0)))
    torch.testing.assert_close(variance, tensor("var_i"), rtol=2e-5, atol=1e-9)
    half = server(personal_share=case["p"], delta=case["delta"])
    state = start(half, torch.zeros(4, dtype=torch.float64))
    total = summed(half, state, updates(tensor("mu"), variance, [1, 1, 2]))
    torch.testing.assert_close(total["params/w"] / 4, tensor("S1"), rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(
        (total["within/w"] + total["between/w"]) / 4, tensor("S2"), rtol=2e-5, atol=1e-9
    )
    within, between = moments(state.params, total)
    torch.testing.assert_close(within["w"] + between["w"], tensor("var_g"), rtol=2e-5, atol=1e-9)
    after = half.finalise(state, total)
    torch.testing.assert_close(after.params["w"], tensor("mu_g"), rtol=2e-5, atol=1e-9)
    assert after.mask["w"].tolist() == [bool(one) for one in case["mask"]]
    broadcast = half.broadcast(after, 0)
    own = torch.where(broadcast.mask["w"], tensor("mu")[0], broadcast.params["w"])
    torch.testing.assert_close(own, tensor("w_client0"), rtol=2e-5, atol=1e-9)


def test_golden_ties(golden):
    """E-B6: exact top-k where a strict quantile would choose nothing [eq. 3]."""
    case = golden["fedbps_mask_ties"]
    assert (
        top(torch.tensor(case["var"]), case["p"]).int().tolist()
        == case["mask_topk_lower_index_first"]
    )


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("threshold", ["global", "tensor"])
@pytest.mark.parametrize("levels", [1, 3, 10**6])
def test_the_mask_has_exactly_the_share(share, threshold, levels):
    """With all entries equal, a few values, and no ties [eq. 3]."""
    generator = torch.Generator().manual_seed(levels)
    sizes = {"a": (7, 9), "b": (5,), "c": (40, 2)}
    scores = {
        name: torch.randint(levels, size, generator=generator).double()
        for name, size in sizes.items()
    }
    mask = server(personal_share=share, threshold=threshold).select(
        scores, {name: torch.zeros(size) for name, size in sizes.items()}
    )
    assert {name: tuple(value.shape) for name, value in mask.items()} == sizes
    half_up = lambda number: int(share * number + 0.5)  # noqa: E731
    if threshold == "tensor":
        assert all(int(value.sum()) == half_up(value.numel()) for value in mask.values())
    else:
        assert sum(int(value.sum()) for value in mask.values()) == half_up(148)
        chosen = torch.cat([scores[name][mask[name]] for name in sizes])
        left = torch.cat([scores[name][~mask[name]] for name in sizes])
        if len(chosen) and len(left):
            assert chosen.min() >= left.max()


def test_half_a_weight_counts_as_a_whole_one():
    """E-B6: p = 0.5 of 5 weights is 3 of them, of 3 weights 2."""
    assert [int(top(torch.arange(n, dtype=torch.float64), 0.5).sum()) for n in (3, 5)] == [2, 3]


def test_a_random_ranking_is_the_same_in_every_round_and_knows_no_variance():
    shapes = {"a": (30, 9), "b": (50,)}
    half = server(personal_share=0.3, ranking="random")
    nothing = {name: torch.zeros(size, dtype=torch.float64) for name, size in shapes.items()}
    draw = torch.Generator().manual_seed(0)
    masks = []
    for _ in range(2):
        within = {
            name: torch.rand(size, generator=draw, dtype=torch.float64)
            for name, size in shapes.items()
        }
        masks.append(half.select(within, nothing))
    for name in shapes:
        assert torch.equal(masks[0][name], masks[1][name])
    assert sum(int(value.sum()) for value in masks[0].values()) == 96
    assert all(0.15 < float(value.double().mean()) < 0.45 for value in masks[0].values())


def test_balanced_ranking_gives_both_terms_a_say():
    """E-B5: the paper's ranking is that of the variance within; balanced divides each term by its
    median.
    """
    within = {"w": torch.tensor([1.0, 1.1, 1.2, 1.3, 1.4], dtype=torch.float64)}
    between = {"w": torch.tensor([5e-6, 4e-6, 3e-6, 2e-6, 1e-6], dtype=torch.float64)}
    assert server(personal_share=0.4).select(within, between)["w"].tolist() == [
        False,
        False,
        False,
        True,
        True,
    ]
    half = server(personal_share=0.4, ranking="balanced")
    assert half.select(within, between)["w"].tolist() == [True, True, False, False, False]
    score = within["w"] / 1.2 + between["w"] / 3e-6
    assert half.select(within, between)["w"].tolist() == [
        bool(one) for one in score >= score.sort().values[-2]
    ]
    nothing = {"w": torch.zeros(5, dtype=torch.float64)}
    # a median of 0 divides nothing
    assert half.select(within, nothing)["w"].tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(("spread", "variance"), [(1e-3, 1e-8), (1e-4, 1e-12)])
def test_the_variance_does_not_depend_on_the_shift_and_is_accurate(spread, variance):
    """E-B9: float32 weights around 1, moments in float64 from any shift, against the two-pass
    formula of [eq. 5].
    """
    generator = torch.Generator().manual_seed(3)
    counts = [5, 17, 40, 2]
    mu = 1 + spread * torch.randn(4, 300, generator=generator)
    sigma = torch.full((4, 300), variance)
    pi = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    mean = pi @ mu.double()
    want = pi @ (sigma.double() + (mu.double() - mean) ** 2)
    half = server()
    for shift in (torch.ones(300), mu[1], torch.zeros(300), -3 * torch.ones(300)):
        state = start(half, shift)
        within, between = moments(state.params, summed(half, state, updates(mu, sigma, counts)))
        # far away the squares are 10^8 times the variance
        near = 1e-9 if shift.mean() > 0.5 else 1e-4
        torch.testing.assert_close(
            within["w"] + between["w"], want, rtol=near, atol=1e-22 if near < 1e-6 else 1e-13
        )
        assert bool((between["w"] >= 0).all())


def test_stacked_sums_are_the_exact_ones():
    generator = torch.Generator().manual_seed(5)
    counts = [5, 17, 40, 2]
    half = server()
    state = start(half, torch.randn(300, generator=generator))
    sent = updates(
        torch.randn(4, 300, generator=generator), torch.rand(4, 300, generator=generator), counts
    )
    fast, exact = half.total(state, (0, 1, 2, 3), stack(sent)), summed(half, state, sent)
    assert fast.keys() == exact.keys()
    for name, value in exact.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-13, atol=1e-13)
    assert torch.equal(half.finalise(state, fast).mask["w"], half.finalise(state, exact).mask["w"])


def test_bits():
    for size in (1, 7, 8, 9, 1000):
        mask = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.4
        packed = pack_bits(mask)
        assert packed.numpy().tobytes() == np.packbits(mask.numpy()).tobytes()
        assert torch.equal(unpack_bits(packed, size), mask)


def test_a_broadcast_that_does_not_fit_the_network_is_refused():
    prepared = small_prepared("fedbps")
    half, state = prepared.halves.client, prepared.halves.server.init(*prepared.halves.initial, ())
    flat = prepared.halves.server.pack(prepared.halves.server.broadcast(state, 0))
    half.unpack(Broadcast, flat)
    for change, words in (
        ({"mask": flat["mask"][:-1]}, "the mask must be"),
        ({"mask": flat["mask"].float()}, "the mask must be"),
        ({"mask": torch.full_like(flat["mask"], 128)}, "shared entries"),
        ({"values": flat["values"][:-1]}, "shared entries"),
        ({"more": flat["values"]}, "is not expected"),
    ):
        with pytest.raises(WireError, match=words):
            half.unpack(Broadcast, {**flat, **change})
    with pytest.raises(WireError, match="'values' is missing"):
        half.unpack(Broadcast, {"mask": flat["mask"]})


@pytest.fixture(scope="module")
def without_victim():
    rig = Rig("fedbps", members=[0, 1, 3, 4], delta=0.5)
    rig.start()
    return rig.strategy.state


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (set_value("variance/head.weight", -1.0), "variance must be in"),
        (set_value("variance/head.weight", 0.0), "variance must be in"),
        (set_value("variance/head.weight", 3.0), r"variance must be in \(0, 2"),
        (set_value("variance/head.weight", float("inf")), "not finite"),
        (rewrite(lambda flat: flat.pop("variance/head.bias")), "is missing"),
        (set_value("num_examples", 0), "num_examples"),
    ],
)
def test_a_client_cannot_choose_the_mask(tamper, words, without_victim):
    """A variance beyond 1/delta or below 0 is refused; the state is as without that client."""
    rig = Rig("fedbps", tamper=tamper, delta=0.5)
    rig.start()
    (fault,) = rig.strategy.faults
    assert re.search(words, fault)
    assert_same_bits(rig.strategy.state, without_victim)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("personal_share", 1.2, "personal_share must be in"),
        ("delta", 0, "delta must be positive"),
        ("delta", "inf", "delta must be positive"),
        ("curvature", "kfac", "curvature must be one of fisher, sketch, empirical"),
        ("ranking", "best", "ranking must be one of paper, balanced"),
        ("threshold", "layer", "threshold must be one of global, tensor"),
        ("statistics", "none", "statistics must be one of local, average"),
    ],
)
def test_settings_are_checked(key, value, words):
    with pytest.raises(ConfigError, match=words):
        small("fedbps", **{key: value})


def test_errata_are_all_named():
    folder = Path(__file__).parents[2] / "bayflower"
    text = "".join((folder / name / "fedbps.py").read_text() for name in ("strategies", "clients"))
    assert {f"E-B{i}" for i in range(1, 11)} <= set(re.findall(r"E-B\d+", text))
