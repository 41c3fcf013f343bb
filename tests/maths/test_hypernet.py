"""The hypernetwork's step: golden numbers, an explicit Jacobian, and torch's own SGD."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import jacrev

from bayflower.maths import hypernet


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_golden_step(golden):
    """alpha = exp(W e + b): two layers that pass positive numbers on, moved by 10 so that they are.
    E-V3, in alpha and in log alpha.
    """
    case = golden["metavd_hypernet_step"]
    weight, bias, e = (double(case[name]) for name in ("W", "b", "e"))
    same = torch.eye(2, dtype=torch.float64)
    psi = {
        "0.weight": same,
        "0.bias": double([10.0, 10.0]),
        "1.weight": same,
        "1.bias": double([0.0, 0.0]),
        "2.weight": weight,
        "2.bias": bias - weight @ double([10.0, 10.0]),
    }
    alpha = hypernet.output(psi, e).exp()
    torch.testing.assert_close(alpha, double(case["alpha"]), rtol=2e-5, atol=1e-9)
    back = double([1.1, 0.9, 1.3])
    delta = double(case["delta_alpha"])
    torch.testing.assert_close(alpha * (back - 1), delta, rtol=2e-5, atol=1e-6)
    # d alpha = alpha d log alpha
    to_psi, to_e = hypernet.ascent(psi, e[None], (alpha * alpha * (back - 1))[None], double([1.0]))
    torch.testing.assert_close(to_e[0], double(case["ascent_e"]), rtol=2e-5, atol=1e-8)
    torch.testing.assert_close(to_psi["2.bias"], double(case["ascent_b"]), rtol=2e-5, atol=1e-8)
    moved = to_psi["2.weight"] - 10 * to_psi["2.bias"][:, None]  # the layer's input is e + 10
    torch.testing.assert_close(moved, double(case["ascent_W"]), rtol=2e-5, atol=1e-7)
    _, to_e = hypernet.ascent(psi, e[None], back.log()[None], double([1.0]))
    torch.testing.assert_close(to_e[0], double(case["ascent_e_in_log_space"]), rtol=2e-5, atol=1e-8)


def test_products_with_the_jacobian_against_the_jacobian():
    psi = hypernet.initial("seed", 3, 5, 7, torch.float64)
    draw = torch.Generator().manual_seed(0)
    embeddings, steps = (torch.randn(4, n, dtype=torch.float64, generator=draw) for n in (3, 7))
    shares = double([0.1, 0.2, 0.3, 0.4])
    to_psi, to_embeddings = hypernet.ascent(psi, embeddings, steps, shares)
    want = {name: torch.zeros_like(value) for name, value in psi.items()}
    for m in range(4):
        jacobian = jacrev(lambda some, m=m: hypernet.output(some, embeddings[m]))(psi)
        for name in want:
            want[name] += shares[m] * torch.tensordot(steps[m], jacobian[name], 1)
        torch.testing.assert_close(
            to_embeddings[m], steps[m] @ jacrev(lambda e: hypernet.output(psi, e))(embeddings[m])
        )
    for name, value in want.items():
        torch.testing.assert_close(to_psi[name], value)


@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_steps_are_those_of_torchs_sgd(clip):
    draw = torch.Generator().manual_seed(0)
    values = {
        "a": torch.randn(3, dtype=torch.float64, generator=draw),
        "b": torch.randn(2, 2, dtype=torch.float64, generator=draw),
    }
    plain = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    stepper = torch.optim.SGD(plain.values(), lr=0.7, momentum=0.6, weight_decay=0.05)
    velocity: dict = {}
    for _ in range(3):
        upwards = {
            name: torch.randn(value.shape, dtype=torch.float64, generator=draw)
            for name, value in values.items()
        }
        values, velocity = hypernet.stepped(
            values, upwards, velocity, rate=0.7, momentum=0.6, decay=0.05, clip=clip
        )
        for name, value in plain.items():
            value.grad = -upwards[name]
        nn.utils.clip_grad_norm_(plain.values(), clip)
        stepper.step()
        for name, value in plain.items():
            torch.testing.assert_close(values[name], value.detach())


def test_an_embedding_belongs_to_a_client_and_a_seed():
    one, again = (hypernet.embedding("s", 17, 4, torch.float32) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, hypernet.embedding("s", 18, 4, torch.float32))
    assert not torch.equal(one, hypernet.embedding("t", 17, 4, torch.float32))


def test_outputs_begin_near_zero_and_decay_leaves_them_there():
    """The start of log alpha is added outside: without a word from the clients weight decay must
    not make dropout of none.
    """
    psi = hypernet.initial("seed", 3, 200, 500, torch.float64)
    e = hypernet.embedding("seed", 0, 3, torch.float64)
    found = hypernet.output(psi, e)
    assert float(found.mean()) == pytest.approx(0, abs=0.1)
    assert float(found.std()) < 1
    still = {name: torch.zeros_like(value) for name, value in psi.items()}
    for _ in range(300):
        psi, _ = hypernet.stepped(psi, still, {}, rate=0.9, momentum=0.0, decay=5e-3, clip=100)
    assert float(hypernet.output(psi, e).square().mean()) < float(found.square().mean())


@pytest.mark.parametrize("asked", [1e-5, 0.02])
def test_outputs_move_no_further_than_the_reach(asked, monkeypatch):
    """Clients ask for a little; J Jᵀ and what the last layer's rows have in common make it much.
    Where it is less, nothing is cut.
    """
    monkeypatch.setattr(hypernet, "MOST", 20 * 5 * 300)  # 300 of the 2,048 weights at once
    psi = hypernet.initial("seed", 3, 200, 2048, torch.float64)
    e = torch.stack([hypernet.embedding("seed", c, 3, torch.float64) for c in range(5)])
    velocity, moves, parts = {}, [], []
    for _ in range(3):
        to_psi, _ = hypernet.ascent(
            psi, e, torch.full((5, 2048), asked, dtype=torch.float64), double([0.2] * 5)
        )
        after, velocity = hypernet.stepped(
            psi, to_psi, velocity, rate=1.0, momentum=0.6, decay=0.0, clip=100
        )
        moves.append(
            float((hypernet.output(after, e) - hypernet.output(psi, e)).square().mean().sqrt())
        )
        both = {**psi, hypernet.OWN: e}, {**after, hypernet.OWN: e}
        way = both[0], hypernet.course(*both)
        parts.append(float(hypernet.fitting(0.1, *way, waits=True)))
        assert hypernet.fitting(0.1, *way, waits=False) == parts[-1]
        shares = 0.5 ** torch.arange(hypernet.SHARES, dtype=torch.float64)
        known = hypernet.moves(shares, *way)
        for share, found in zip(shares.tolist(), known.tolist(), strict=True):
            there = hypernet.between(share, *both)
            gone = hypernet.output(there, there[hypernet.OWN]) - hypernet.output(psi, e)
            assert found == pytest.approx(float(gone.square().mean().sqrt()), rel=1e-9)
        assert parts[-1] == max(shares[known <= 0.1].tolist())
        mixed = {name: value + parts[-1] * (after[name] - value) for name, value in psi.items()}
        moved = float((hypernet.output(mixed, e) - hypernet.output(psi, e)).square().mean().sqrt())
        assert moved <= 0.1
        assert parts[-1] == 1 or moved > 0.02
        psi = after
    if asked == 0.02:
        assert parts[0] < 1
        assert max(moves) > 100 * asked
    else:
        assert parts == [1, 1, 1]
        assert moves[0] > 5 * asked


def test_a_share_smaller_than_those_looked_at_is_found_by_halving(monkeypatch):
    psi = hypernet.initial("seed", 3, 20, 50, torch.float64)
    e = torch.stack([hypernet.embedding("seed", c, 3, torch.float64) for c in range(4)])
    far = {name: value + 1e8 for name, value in psi.items()}
    both = {**psi, hypernet.OWN: e}, {**far, hypernet.OWN: e}
    way = both[0], hypernet.course(*both)
    assert hypernet.fitting(0.1, *way, waits=False) == 0
    share = hypernet.within(0.1, *both)
    moved = hypernet.moves(double([share, 2 * share]), *way)
    assert moved[0] <= 0.1 < moved[1]
    assert share < 0.5**hypernet.SHARES
    monkeypatch.setattr(hypernet, "SHARES", 50)
    for waits in (True, False):
        assert hypernet.fitting(0.1, *way, waits=waits) == share
    monkeypatch.setattr(hypernet, "MOST", 50 * 4 * 7)  # seven of the 50 weights at once
    assert hypernet.fitting(0.1, *way, waits=False) == share
