"""Changes of stacked clients that are shortened: by the definition in float64, one client after the
other; on a GPU by a kernel.
"""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES

from bayflower.stacked.shorter import shorter

FACTORS = [1.0, 0.3, 0.9, 0.0, 1e-12, 1.0]
SHAPES = [(), (1,), (7, 3), (41, 101), (0,), (2048,), (2049,)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_client_goes_its_share_of_the_way(device, moved, shape, dtype):
    draw = torch.Generator().manual_seed(1)
    leaf = torch.randn(len(FACTORS), *shape, generator=draw).to(device, dtype)
    start = torch.randn(shape, generator=draw).to(device, dtype) if moved else None
    factor = torch.tensor(FACTORS, dtype=torch.float64, device=device)
    zero = torch.zeros(shape, device=device).double() if start is None else start.double()
    want = torch.stack(
        [zero + by * (one.double() - zero) for by, one in zip(FACTORS, leaf, strict=True)]
    )
    before = leaf.clone()
    found = shorter(leaf, start, factor)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(leaf, before)
    for at in (0, 5):
        assert torch.equal(found[at], leaf[at])  # to the bit
    if start is not None:
        assert torch.equal(found[3], start)
        wide = shorter(leaf, start.double(), factor)  # sent in another type
        torch.testing.assert_close(wide, found, rtol=1e-6, atol=1e-6)
    turned = leaf.transpose(0, -1).contiguous().transpose(0, -1)  # not in the order of memory
    torch.testing.assert_close(shorter(turned, start, factor), found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_no_number_stays_with_its_client(device):
    leaf = torch.ones(3, 5, device=device)
    leaf[1, 2] = float("nan")
    factor = torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64, device=device)
    found = shorter(leaf, torch.zeros(5, device=device), factor)
    assert found.isnan().sum() == 1
    assert bool(found[1, 2].isnan())
    assert found[0].tolist() == [0.5] * 5
