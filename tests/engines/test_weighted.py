"""Weighted sums over stacks: those of float64, on a GPU by a kernel that reads each number once."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES

from bayflower.stacked import weighted
from bayflower.stacked.weighted import weighted_sum

SHAPES = [(1, 70_001), (7, 3, 5), (50, 513, 130), (6, 40, 300), (3, 0)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_the_sums_one_after_the_other(device, shape, dtype):
    make = torch.Generator().manual_seed(3)
    stack = torch.randn(shape, generator=make, dtype=torch.float64).to(device, dtype)
    weight = torch.rand(shape[0], generator=make, dtype=torch.float64).mul(100).to(device)
    want = torch.zeros(shape[1:], dtype=torch.float64, device=device)
    for share, one in zip(weight, stack, strict=True):
        want += share * one.double()
    found = weighted_sum(weight, stack)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-11)
    turned = stack.transpose(0, -1).contiguous().transpose(0, -1)  # not in the order of memory
    torch.testing.assert_close(weighted_sum(weight, turned), want, rtol=1e-13, atol=1e-11)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_no_number_stays_none(device):
    stack = torch.ones(3, weighted.LARGE, device=device)
    stack[1, 5], stack[2, 6] = float("nan"), float("inf")
    found = weighted_sum(torch.ones(3, device=device).double(), stack)
    assert bool(found[5].isnan())
    assert float(found[6]) == float("inf")
    assert float(found[7]) == 3.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernels", [True, False])
def test_small_stacks_are_summed_at_once_to_their_own_sums(device, kernels, monkeypatch):
    """Of several kinds, one large, one empty, one a number a client."""
    make = torch.Generator().manual_seed(5)
    counts = torch.randint(2**40, (7,), generator=make)  # too large for a float32
    stacks = {
        "large": torch.randn(7, weighted.LARGE, generator=make),
        "number": torch.randn(7, generator=make),
        "matrix": torch.randn(7, 3, 5, generator=make),
        "turned": torch.randn(7, 5, 3, generator=make).mT,
        "fine": torch.randn(7, 4, generator=make).double(),
        "count": counts,
        "empty": torch.empty(7, 0),
    }
    stacks = {name: stack.to(device) for name, stack in stacks.items()}
    weight = torch.rand(7, generator=make, dtype=torch.float64).to(device)
    sums = []
    if kernels and device == "cpu":  # their kernels are not there
        monkeypatch.setattr(weighted, "has_kernels", lambda stack: True)
        monkeypatch.setattr(weighted, "LARGE", 2**62)
    plain = weighted.side_by_side
    monkeypatch.setattr(weighted, "side_by_side", lambda *some: sums.append(1) or plain(*some))
    found = weighted.weighted_sums(weight, stacks)
    assert list(found) == list(stacks)
    for name, stack in stacks.items():
        want = torch.tensordot(weight, stack.double(), 1)
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name], want, rtol=1e-13, atol=1e-11)
    assert len(sums) == (3 if kernels or device != "cpu" else 0)  # float32, float64, int64
