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
