"""Variational dropout's own functions for stacks against the plain formulas of `maths/dropout.py`:
values, first and second derivatives, client by client; their GPU kernels against float64.
"""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES, GPU
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map_only

from bayflower.maths import dropout
from bayflower.stacked import spreads

# clients, samples, outputs, inputs
SIZES = [(3, 5, 4, 7), (1, 1, 1, 1), (2, 33, 129, 65), (4, 10, 3, 1024)]
LIMIT = dropout.LIMIT


def plain_spread(start, step, theta, limit, dropped=None):
    log_alpha = (start + step).clamp(-limit, limit)
    kl = torch.log1p(torch.exp(-log_alpha)) / 2
    if dropped is not None:
        theta, kl = theta.masked_fill(dropped, 0), kl.masked_fill(dropped, 0)
    return kl.mean(), log_alpha.exp() * theta.square()


def plain_disturbed(output, variance, noise):
    safe = torch.where(variance > 0, variance, 1.0).sqrt()
    return output + torch.where(variance > 0, safe, 0.0) * noise


def inputs(clients, samples, outputs, into, masked, dtype=torch.float64):
    """Return (start, step, theta, dropped, x, noise), with clients in front: some log alphas lie on
    their limits and beyond, some outputs have no variance, some noise is for a larger batch.
    """
    make = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(clients, *shape, dtype=dtype, generator=make)

    start, step, theta = 4 * draw(outputs, into), 4 * draw(outputs, into), draw(outputs, into)
    if theta[0].numel() > 2:
        flat = start.view(clients, -1), step.view(clients, -1)
        for place, value in enumerate((LIMIT, -LIMIT)):  # exactly there: the slope is that within
            flat[0][:, place], flat[1][:, place] = value / 2, value / 2
    dropped = draw(outputs, into) > 0.5 if masked else None
    x = draw(samples, into)
    x[:, 0] = 0
    return start, step, theta, dropped, x, draw(samples + 2, outputs)


def objective(spread, disturbed, square):
    """Return a loss in which the mean KL, the variances and the draw all matter."""

    def loss(learned, start, dropped, noise):
        step, theta, x = learned
        kl, variance = spread(start, step, theta, LIMIT, dropped)
        output = x @ theta.T
        drawn = disturbed(output, square(x) @ variance.T, noise[: len(x)])
        return kl * (1 + x.square().mean()) + drawn.square().log1p().mean()

    return loss


PLAIN = objective(plain_spread, plain_disturbed, lambda x: x**2)
OWN = objective(spreads.spread, spreads.disturbed, spreads.square)


def twice(loss):
    """Return the slope of the length of a loss's gradient."""

    def length(learned, *rest):
        return sum(value.square().sum() for value in grad(loss)(learned, *rest))

    return grad(length)


def each(fn, tree):
    return tree_map_only(torch.Tensor, fn, tree)


def assert_near(got, want, tolerance):
    every = map(tree_leaves, (got, want))
    for a, b in zip(*every, strict=True):
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        assert float((a - b).norm()) <= tolerance * float(b.norm()) + 1e-12


def exact(x):
    return x.cpu().double() if x.is_floating_point() else x.cpu()


def both(sizes, masked, convert=lambda x: x):
    """Return the arguments of a loss, converted, and what they then are in float64."""
    start, step, theta, dropped, x, noise = inputs(*sizes, masked)
    args = each(convert, ((step, theta, x), start, dropped, noise))
    return args, each(exact, args)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_derivatives_are_those_of_the_plain_formulas(sizes, masked):
    args, _ = both(sizes, masked)
    dims = (0, 0, 0 if masked else None, 0)
    for take in (grad_and_value, twice):
        want = vmap(take(PLAIN), dims)(*args)
        got = vmap(take(OWN), dims)(*args)
        assert_near(got, want, 1e-10)
        for client in range(sizes[0]):  # alone it has its numbers in the stack
            one = each(lambda leaf, c=client: leaf[c], args)
            mine = each(lambda leaf, c=client: leaf[c], got)
            assert_near(take(OWN)(*one), mine, 1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_stacks_of_stacks_and_shared_starts(masked):
    """Gradients of single samples of many clients; what the clients share has no axis of theirs."""
    (learned, start, dropped, noise), _ = both((3, 5, 4, 7), masked)
    start, dropped = start[0], dropped[0] if masked else None
    for take in (grad, twice):

        def single(learned, x, noise, loss, take=take):
            step, theta = learned
            return take(loss)((step, theta, x[None]), start, dropped, noise[None])

        def every(loss, single=single):
            many = vmap(lambda *one: single(*one, loss), (None, 0, 0))
            return vmap(many)(learned[:2], learned[2], noise[:, : learned[2].shape[1]])

        assert_near(every(OWN), every(PLAIN), 1e-10)


def test_slopes_and_their_slopes_are_those_of_differences():
    start, step, theta, dropped, x, noise = (one[0] for one in inputs(1, 3, 2, 3, True))
    step, start = step / 4, start / 4  # away from the limits, at which differences have no slope
    step[0, 0] = 2 * LIMIT
    free = [one.clone().requires_grad_() for one in (start, step, theta)]
    for mask in (None, dropped):
        for check in (gradcheck, gradgradcheck):
            assert check(lambda a, b, c, m=mask: spreads.spread(a, b, c, LIMIT, m), free)
    variance = (x[1:] ** 2 @ theta.T**2).requires_grad_()  # at 0 differences have no slope
    output, noise = torch.randn_like(variance).requires_grad_(), noise[1:3]
    for check in (gradcheck, gradgradcheck):
        assert check(lambda a, b: spreads.disturbed(a, b, noise), (output, variance))
        assert check(spreads.square, (x.clone().requires_grad_(),))
        slope = (output, variance, noise)  # of a slope, in its own gradient as well
        assert check(lambda a, b, c: spreads.DisturbedSlope.apply(a, b, c.detach()), slope)


def test_nothing_has_a_slope_beyond_the_limits_or_without_variance():
    total = torch.tensor([[-LIMIT - 1, -LIMIT, 0.0, LIMIT, LIMIT + 1]], dtype=torch.float64)
    theta = torch.ones_like(total)
    for fn in (plain_spread, spreads.spread):

        def loss(step, fn=fn):
            kl, variance = fn(torch.zeros_like(step), step, theta, LIMIT)
            return kl + variance.sum()

        assert (grad(loss)(total) != 0).tolist() == [[False, True, True, True, False]]
    zero = torch.zeros(2, 3)
    args = torch.ones(2, 3), zero, torch.ones(2, 3)
    assert torch.equal(spreads.disturbed(*args), args[0])
    slope = grad(lambda v: spreads.disturbed(args[0], v, args[2]).sum())
    assert torch.equal(slope(zero), zero)
    assert torch.equal(grad(lambda v: slope(v).sum())(zero), zero)


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_kl_keeps_its_digits(device):
    """Where alpha is large ½ log(1 + 1/alpha) is 1e-4, and 1 + 1/alpha has lost its digits."""
    start = torch.linspace(LIMIT - 1, LIMIT, 99, device=device)[:, None, None]
    none, theta = torch.zeros_like(start), torch.ones_like(start)
    kl, _ = vmap(lambda *one: spreads.spread(*one, LIMIT))(start, none, theta)
    want = torch.log1p(torch.exp(-start.double()))[:, 0, 0] / 2
    torch.testing.assert_close(kl.double(), want, rtol=2e-6, atol=0)


def test_a_scaled_number_is_the_same_and_its_slope_is_not():
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss(value, rate):
        return (spreads.scaled(value, rate) ** 3).sum()

    assert torch.equal(spreads.scaled(x, 5.0), x)
    torch.testing.assert_close(grad(loss)(x, 5.0), 15 * x**2)
    torch.testing.assert_close(vmap(grad(loss), (0, None))(x, 5.0), 15 * x**2)
    second = grad(lambda value: grad(loss)(value, 5.0).sum())
    torch.testing.assert_close(second(x), 5 * 5 * 6 * x)  # once a derivative


@pytest.mark.parametrize("masked", [False, True])
def test_on_a_cpu_the_formulas_are_torchs(masked, monkeypatch):
    """No function of its own there: bits are those of the expressions."""
    monkeypatch.setattr(spreads, "Spread", None)
    monkeypatch.setattr(spreads, "Disturbed", None)
    monkeypatch.setattr(spreads, "Square", None)
    start, step, theta, dropped, x, noise = (
        None if one is None else one[0] for one in inputs(1, 5, 4, 7, masked)
    )
    theta = theta.masked_fill(dropped, 0) if masked else theta
    kl, variance = dropout.kl_and_variance(start, step, theta, dropped)
    want = plain_spread(start, step, theta, LIMIT, dropped)
    torch.testing.assert_close((kl, variance()), want)
    through = dropout.output_variance(x, variance())
    noise = noise[: len(x)]
    got = dropout.disturbed(x @ theta.T, through, noise)
    assert torch.equal(got, plain_disturbed(x @ theta.T, x.square() @ variance().T, noise))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.float64, 1e-10)])
class TestKernels:
    pytestmark = GPU

    def moved(self, dtype):
        return lambda x: x.cuda().to(dtype) if x.is_floating_point() else x.cuda()

    @pytest.fixture(autouse=True)
    def exact_products(self):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        yield
        torch.backends.cuda.matmul.allow_tf32 = before

    def test_values_and_derivatives(self, sizes, masked, dtype, tolerance):
        args, plain = both(sizes, masked, self.moved(dtype))
        dims = (0, 0, 0 if masked else None, 0)
        for take in (grad_and_value, twice):
            want = vmap(take(PLAIN), dims)(*plain)
            got = vmap(take(OWN), dims)(*args)
            # the plain formulas round as well, in second derivatives by more than the tolerance
            torchs = vmap(take(PLAIN), dims)(*args)
            every = (tree_leaves(each(exact, some)) for some in (got, want, torchs))
            for own, right, other in zip(*every, strict=True):
                most = max(tolerance * float(right.norm()), 4 * float((other - right).norm()))
                assert torch.isfinite(own).all()
                assert float((own - right).norm()) <= most + 1e-12

    def test_two_runs_have_the_same_bits(self, sizes, masked, dtype, tolerance):
        args, _ = both(sizes, masked, self.moved(dtype))
        dims = (0, 0, 0 if masked else None, 0)
        one, two = (vmap(grad_and_value(OWN), dims)(*args) for _ in range(2))
        for a, b in zip(*map(tree_leaves, (one, two)), strict=True):
            assert torch.equal(a, b)
