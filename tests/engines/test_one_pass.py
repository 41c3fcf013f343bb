"""Sizes and sketches of updates in one pass: which programs have which columns, what the passes are
for, and the kernels against numpy in float64, one client after another.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import GPU

from bayflower.fused.replies import finite
from bayflower.rounds import measured
from bayflower.rounds.gate import SIZE, Gate
from bayflower.rounds.parts import Part, flat, parts_of, size_of
from bayflower.rounds.robust import Measured
from bayflower.strategies import fedavg

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the shapes of the tensors of one client
SHAPES = {
    "logistic": [(10, 784), (10,)],
    "small": [(3, 2), (), (5,)],
    "digits": [(32, 1, 5, 5), (32,), (64, 32, 5, 5), (64,), (512, 1024), (512,), (10, 512), (10,)],
    "whole blocks": [(2, SIZE), (SIZE,), (3 * SIZE,)],
    "one long": [(21 * SIZE + 5,)],
    "many": [(7 * k % 61 + 1, 40) for k in range(19)],
    "many small": [(k + 1,) for k in range(17)],
}
KINDS = [torch.float32, torch.float64]


def made(name: str, clients: int, kind: torch.dtype, moved: bool = True, device: str = "") -> Part:
    """Return a part of updates with the shapes of a case; `moved`: around what was sent."""
    draw = torch.Generator().manual_seed(clients)
    # named so that their order is not that of the dict
    names = {f"{9 - at % 10}.{at}": shape for at, shape in enumerate(SHAPES[name])}
    sent = {one: torch.randn(shape, generator=draw, dtype=kind) for one, shape in names.items()}
    leaves = {
        one: 0.3 * start + torch.randn(clients, *start.shape, generator=draw, dtype=kind)
        for one, start in sent.items()
    }
    to = device or DEVICE
    leaves = {one: leaf.to(to) for one, leaf in leaves.items()}
    sent = {one: start.to(to) for one, start in sent.items()} if moved else {}
    return Part("params", "params", "model", leaves, sent)


def oracle(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Return the norms and sketches of changes, column after column."""
    names, found = sorted(part.leaves), ([], [])
    for client in range(len(part.leaves[names[0]])):
        row: list[np.ndarray] = []
        for name in names:
            leaf = part.leaves[name][client].cpu()
            change = leaf - part.sent[name].cpu() if part.sent else leaf
            row.append(change.reshape(-1).double().numpy())
        whole = np.concatenate(row)
        draw = torch.Generator().manual_seed(len(whole))
        sign = 2 * torch.randint(2, (len(whole),), generator=draw).numpy() - 1
        sketch = np.zeros(SIZE)
        np.add.at(sketch, np.arange(len(whole)) % SIZE, whole * sign)
        found[0].append(np.sqrt(sum(number * number for number in whole)))
        found[1].append(sketch)
    return np.array(found[0]), np.stack(found[1])


def check(part: Part, kind: torch.dtype) -> None:
    """Compare what is measured of a part with the oracle."""
    sizes, sketches = measured.measure([part], Gate())
    norms, rows = oracle(part)
    assert sketches is not None
    assert sketches.models
    assert sketches.rows.dtype == kind
    assert sizes["params"].dtype == torch.float64
    assert np.allclose(sizes["params"].cpu(), norms, rtol=1e-12)
    exact = 1e-12 if kind == torch.float64 else 3e-6
    assert np.allclose(sketches.rows.cpu(), rows, rtol=0, atol=exact * max(np.abs(rows).max(), 1))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_sketches_are_those_of_the_changes(name, kind):
    for moved in (True, False):
        check(made(name, 3, kind, moved, "cpu"), kind)


def test_on_a_cpu_rows_are_written_and_their_bits_stay():
    part = made("logistic", 4, torch.float32, device="cpu")
    sizes, sketches = measured.measure([part], Gate())
    rows = flat(part)
    assert torch.equal(sizes["params"], size_of(part, rows))
    assert torch.equal(sketches.rows, Gate().sketch(rows))


@pytest.mark.parametrize("clients", [1, 5, 50, 3000])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("most", [1, 8])
def test_programs_have_every_column_once(name, clients, most):
    """Walks through blocks as the kernel does."""
    lengths = [int(np.prod(shape)) for shape in SHAPES[name]]
    launches = measured.plan(lengths, clients, most)
    assert sum(one.number for one in launches) == len(lengths)
    seen: list[int] = []
    for one in launches:
        assert 1 <= one.number <= most
        assert 1 <= one.groups <= measured.GROUPS
        begin = one.begin
        assert begin == sum(lengths[: one.first])
        for length in lengths[one.first : one.first + one.number]:
            for group in range(one.groups):
                first = begin // SIZE
                start = first + (group + one.groups - first % one.groups) % one.groups
                for block in range(start, -(-(begin + length) // SIZE), one.groups):
                    assert block % one.groups == group
                    columns = range(block * SIZE, (block + 1) * SIZE)
                    seen += [c for c in columns if begin <= c < begin + length]
            begin += length
    assert sorted(seen) == list(range(sum(lengths)))


def test_few_blocks_take_one_launch_and_many_fill_the_device():
    assert measured.plan([7840, 10], 10, 8) == [(0, 2, 0, 1)]
    ((_, _, _, groups),) = measured.plan([582_000], 50, 8)
    assert 800 <= 50 * groups <= measured.FULL
    assert measured.plan([582_000], 5000, 8)[0].groups == 1


def test_what_no_kernel_is_for_is_written_as_rows(monkeypatch):
    monkeypatch.setattr(measured, "has_kernels", lambda x: True)
    part = made("small", 3, torch.float32, device="cpu")
    names = sorted(part.leaves)
    leaves, sent = [part.leaves[one] for one in names], [part.sent[one] for one in names]
    assert measured.fits(leaves, sent)
    assert measured.fits(leaves, [])
    wide = torch.randn(3, 4, 6)
    for other in (
        wide.mT,
        wide[:, :, ::2],
        wide.double(),
        wide.bfloat16(),
        wide[:1].expand(3, 4, 6),
    ):
        assert not measured.fits([wide, other], [])
    assert not measured.fits([wide.bfloat16()], [])
    assert not measured.fits([wide], [torch.zeros(6, 4).mT])
    assert not measured.fits([wide], [torch.zeros(6)])  # it is spread over the rows
    assert measured.fits([wide], [torch.zeros(4, 6).double()])
    monkeypatch.setattr(measured, "in_one_pass", None)  # not called
    only = {one: torch.ones_like(leaf[:1], dtype=torch.bool) for one, leaf in part.leaves.items()}
    found, _ = measured.measured(part._replace(only=only), Gate())
    assert torch.equal(found, size_of(part))
    kept = {one: leaf.bfloat16() for one, leaf in part.leaves.items()}
    assert measured.measured(part._replace(leaves=kept), None)[0].shape == (3,)


@pytest.mark.parametrize("field", ["params", "buffers", "losses", "none"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_sizes_that_are_known_tell_what_is_finite(field, wrong):
    """Oracle: every number of every client is looked at."""
    half = fedavg.Server.__new__(fedavg.Server)
    draw = torch.Generator().manual_seed(3)
    updates = fedavg.Update(
        torch.tensor([3, 4, 5, 6], device=DEVICE),
        {name: torch.randn(4, 3, 5, generator=draw).to(DEVICE) for name in "ab"},
        {"mean": torch.randn(4, 7, generator=draw).to(DEVICE)},
    )
    losses = torch.randn(4, generator=draw).to(DEVICE)
    state = fedavg.State(
        {name: torch.zeros(3, 5, device=DEVICE) for name in "ab"},
        {"mean": torch.zeros(7, device=DEVICE)},
    )
    if field == "losses":
        losses[2] = wrong
    elif field != "none":
        sorted(getattr(updates, field).items())[-1][1][2].view(-1)[-1] = wrong
    want = [
        bool(losses[client].isfinite())
        and all(
            bool(leaf[client].isfinite().all())
            for tree in (updates.params, updates.buffers)
            for leaf in tree.values()
        )
        for client in range(4)
    ]
    assert want == [True, True, field == "none", True]
    parts = parts_of(half, state, updates)
    sizes, sketches = measured.measure(parts, None)
    seen = Measured(range(4), parts, updates, sizes, sketches)
    assert seen.telling.keys() == {"params", "buffers"}
    assert finite(updates, losses).tolist() == want
    assert finite(updates, losses, seen.telling).tolist() == want
    cut = [part._replace(only={"a": torch.ones(1, 3, 5, dtype=torch.bool)}) for part in parts]
    assert not seen._replace(parts=cut).telling  # they do not cover their fields


@pytest.mark.parametrize("clients", [1, 3, 50])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
class TestKernels:
    pytestmark = GPU

    def test_they_measure_what_the_oracle_does(self, name, clients, kind):
        for moved in (True, False):
            part = made(name, clients, kind, moved)
            check(part, kind)
            (again, rows), (found, same) = (measured.measured(part, Gate()) for _ in range(2))
            assert torch.equal(again, found)
            assert torch.equal(rows, same)
            alone, none = measured.measured(part, None)
            assert none is None
            # other sums of the same squares: registers are shared out otherwise
            assert torch.allclose(alone, found, rtol=1e-14, atol=0)

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
    def test_a_number_that_is_none_is_seen_in_its_client_alone(self, name, clients, kind, wrong):
        part = made(name, clients, kind)
        for leaf in part.leaves.values():
            leaf[-1].reshape(-1)[-1] = wrong
            sizes, _ = measured.measured(part, Gate())
            assert sizes.isfinite().tolist() == [True] * (clients - 1) + [False]
            leaf[-1] = 0.5


class TestOnADevice:
    pytestmark = GPU

    def test_what_was_sent_may_have_another_type(self):
        part = made("small", 3, torch.float32)
        sent = {one: start.double() for one, start in part.sent.items()}
        found, want = (measured.measured(one, Gate()) for one in (part._replace(sent=sent), part))
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], want[1])

    def test_a_recording_measures_what_is_there_when_it_is_replayed(self):
        part, own = made("digits", 5, torch.float32), Gate()
        measured.measured(part, own)  # compiled, and the signs are there
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sizes, rows = measured.measured(part, own)
        for leaf in part.leaves.values():
            leaf *= 2.0
        graph.replay()
        want, sketch = oracle(part)
        assert np.allclose(sizes.cpu(), want, rtol=1e-12)
        assert np.allclose(rows.cpu(), sketch, rtol=0, atol=3e-6 * np.abs(sketch).max())
