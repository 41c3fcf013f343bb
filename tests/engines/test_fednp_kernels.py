"""The GPU kernels of FedNP's regulariser, f-layer and factors against plain formulas in float64:
values, gradients, and what has no kernels.
"""

from __future__ import annotations

import pytest
import torch
from devices import GPU
from torch.func import grad, grad_and_value, vmap

from bayflower.maths import fromfeatures, npn, propagation
from bayflower.maths.gaussian import Diagonal
from bayflower.maths.tilted import make_slopes
from bayflower.stacked import meanlayer, products
from bayflower.stacked.linear import Linear

pytest.importorskip("bayflower.stacked.propagationkernels")

pytestmark = GPU
EPSILON, WEIGHT = 0.1, 0.01


def inputs(clients: int, dim: int, wide: int, outputs: int, spread: float = 1.0):
    """Return (f, the cavity in float64, layers, target), with clients in front."""
    make = torch.Generator().manual_seed(0)

    def draw(*shape, size=1.0):
        return size * torch.randn(clients, *shape, generator=make)

    precision, shift = 1 + 3 * draw(dim).abs().double(), 2 * draw(dim).double()
    layers = {}
    for layer, rows, columns in (("1", dim, wide), ("2", wide, outputs)):
        layers[f"{layer}.weight.mean"] = draw(rows, columns, size=0.5 * rows**-0.5)
        layers[f"{layer}.weight.rho"] = draw(rows, columns) - 6
        layers[f"{layer}.bias.mean"] = draw(columns, size=0.3)
        layers[f"{layer}.bias.rho"] = draw(columns, size=0.5) - 2.3
    found = draw(dim, size=spread), Diagonal(precision, shift), layers, draw(outputs, size=0.3)
    return torch.utils._pytree.tree_map(lambda leaf: leaf.cuda(), found)


def loss(moments: str = "trapezoid", nodes: int = 65):
    slopes = make_slopes(moments, nodes)

    def one(learned, cavity):
        f, layers, target = learned
        return propagation.regulariser(f, cavity, layers, target, slopes, EPSILON, WEIGHT)

    return one


def exact(tree):
    return torch.utils._pytree.tree_map(torch.Tensor.double, tree)


def assert_near(got, want, tolerance: float = 1e-5) -> None:
    every = map(torch.utils._pytree.tree_leaves, (got, want))
    for a, b in zip(*every, strict=True):
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        assert float((a - b).norm()) <= tolerance * float(b.norm())


SIZES = {
    "fmnist": (50, 10, 10, 5120),
    "odd numbers": (3, 7, 5, 1033),
    "one client, few weights": (1, 10, 10, 3),
    "one of everything": (2, 1, 1, 1),
    "many weights": (1, 3, 2, 70001),
    "wide": (3, 33, 40, 257),
}


@pytest.mark.parametrize("name", SIZES)
def test_values_and_gradients_are_those_of_the_plain_formula(name):
    f, cavity, layers, target = inputs(*SIZES[name])
    learned = f, layers, target
    args = f[0], {name: value[0] for name, value in layers.items()}, target[0]
    assert propagation.has_form(*args, make_slopes("trapezoid"))
    got = vmap(grad_and_value(loss()))(learned, cavity)
    assert_near(got, vmap(grad_and_value(loss()))(exact(learned), cavity))
    # a client alone has its numbers in the stack
    alone = torch.utils._pytree.tree_map(lambda leaf: leaf[0], (learned, cavity))
    assert_near(grad(loss())(*alone), torch.utils._pytree.tree_map(lambda x: x[0], got[0]), 1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_a_step_takes_the_slopes_without_writing_them(name):
    """The target is the classifier's weights, which have a product left besides."""
    f, cavity, layers, target = inputs(*SIZES[name])
    params = {**layers, "head": target[:, None]}
    x = torch.randn(len(f), 4, target.shape[1], generator=torch.Generator().manual_seed(1)).cuda()
    rate = 0.3

    def value(params, f, cavity, x):
        some = {name: params[name] for name in layers}
        kl = loss()((2 * f, some, params["head"].reshape(-1)), cavity)
        return kl + Linear.apply(x, params["head"], None, 1.0, False).sin().sum() / 100

    want = vmap(grad(value, argnums=(0, 1)))(params, f, cavity, x)
    with products.products(params) as left:
        found, to_f = vmap(grad(value, argnums=(0, 1)))(params, f, cavity, x)
    assert_near(to_f, want[1], 1e-6)
    assert len(left.found) == 2
    others = left.others(found)
    assert others.keys() <= {"head"}
    after = {name: params[name] - rate * slope for name, slope in want[0].items()}
    left.descend(rate)  # first: the kernel reads the weights
    for name, slope in others.items():
        params[name].sub_(rate * slope)
    assert_near(params, after, 1e-6)


@pytest.mark.parametrize("factor", [1.0, 0.7])
@pytest.mark.parametrize(("name", "features"), [("fmnist", 512), ("wide", 70), ("odd numbers", 3)])
def test_a_step_from_features_is_that_of_the_layer_and_the_regulariser(name, features, factor):
    _, cavity, layers, target = inputs(*SIZES[name])
    make = torch.Generator().manual_seed(4)
    clients, dim = cavity.shift.shape
    shapes = {"weight": (features, dim), "bias": (dim,)}
    own = {n: torch.randn(clients, *s, generator=make).cuda() for n, s in shapes.items()}
    own["weight"] /= features**0.5
    params = {**layers, **own, "head": target}
    x = torch.randn(clients, 6, features, generator=make).cuda()
    mask = torch.ones(clients, 6).cuda()
    mask[0, 2:], mask[-1] = 0, 0
    rate = 0.3

    def value(params, x, mask, cavity):
        some = {name: params[name] for name in layers}
        known = (cavity, some, params["head"], make_slopes("trapezoid"), EPSILON, WEIGHT)
        kl = fromfeatures.regularised(x, (params["weight"], params["bias"]), mask, *known)
        return factor * kl + x.sin().sum() / 100

    step = vmap(grad_and_value(value, argnums=(0, 1)))
    (want, want_x), total = step(exact(params), x.double(), mask.double(), cavity)
    with products.products(params) as left:
        (found, to_x), got = step(params, x, mask, cavity)
    assert_near((to_x, got), (want_x, total))
    assert len(left.found) == 2
    assert not left.others(found)
    after = {name: params[name].double() - rate * slope for name, slope in want.items()}
    before = {name: value.clone() for name, value in params.items()}
    left.descend(rate)
    for name, value in params.items():
        moved = float((after[name] - before[name]).norm())
        assert float((value - after[name]).norm()) <= 1e-5 * moved + 2e-7 * float(value.norm())


def factors(dim: int, spread: float, clients: int = 5) -> tuple[torch.Tensor, ...]:
    """Return f, the cavity and the factors before, in float64."""
    f, cavity, _, _ = inputs(clients, dim, 1, 1, spread)
    make = torch.Generator().manual_seed(1)
    own = [torch.randn(clients, dim, generator=make, dtype=torch.float64) for _ in range(2)]
    return f.double(), *cavity, own[0].abs().cuda(), own[1].cuda()


@pytest.mark.parametrize("damping", [0.3, 1.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0])
@pytest.mark.parametrize(("dim", "nodes"), [(10, 65), (7, 9), (40, 33), (1, 3)])
def test_new_factors_are_those_of_the_plain_formula(dim, nodes, spread, damping):
    tensors, slopes = factors(dim, spread), make_slopes("quadrature", nodes)
    assert propagation.factor_nodes(tensors, slopes) == nodes
    got = propagation.stacked_factors(*tensors, slopes, damping)
    want = propagation.factors_of(*tensors, slopes, damping)
    assert_near(got, want, 1e-12)
    assert torch.equal(got[2], tensors[3] + got[0])  # the server's ledger adds up the changes
    assert torch.equal(got[3], tensors[4] + got[1])


def test_a_factor_that_is_not_finite_stays():
    tensors, slopes = factors(10, 5.0), make_slopes("trapezoid")
    tensors[0][0, 0], tensors[1][2, 2], tensors[2][4, 9] = float("nan"), float("nan"), float("inf")
    got = propagation.stacked_factors(*tensors, slopes, 0.5)
    assert_near(got, propagation.factors_of(*tensors, slopes, 0.5), 1e-12)
    for client, place in ((0, 0), (2, 2), (4, 9)):
        assert got[0][client, place] == got[1][client, place] == 0


def test_moments_in_closed_form_have_no_kernel_for_factors():
    tensors, slopes = factors(10, 1.0), make_slopes("thm2")
    assert propagation.factor_nodes(tensors, slopes) is None
    for _ in range(3):  # a plain call, a recording, a replay
        got = propagation.stacked_factors(*tensors, slopes, 0.5)
        assert_near(got, propagation.factors_of(*tensors, slopes, 0.5), 1e-12)


def test_programs_that_end_in_any_order_give_the_same_sums():
    f, cavity, layers, target = inputs(*SIZES["fmnist"])
    every = [vmap(grad_and_value(loss()))((f, layers, target), cavity) for _ in range(20)]
    for slopes, value in every[1:]:
        assert torch.equal(value, every[0][1])
        assert torch.equal(slopes[0], every[0][0][0])


@pytest.mark.parametrize("spread", [0.0, 1e-4, 5.0, 100.0])
def test_f_may_be_nothing_or_beyond_its_bounds(spread):
    f, cavity, layers, target = inputs(3, 10, 10, 300, spread)
    slopes, value = vmap(grad_and_value(loss()))((f, layers, target), cavity)
    want, right = vmap(grad_and_value(loss()))(exact((f, layers, target)), cavity)
    assert_near((value, slopes[1:]), (right, want[1:]))
    assert (slopes[0] - want[0]).norm() <= 1e-5 * want[0].norm() + 1e-7
    if spread == 100:
        assert (slopes[0] == 0).any()  # clipped


def test_a_number_of_nodes_may_be_given():
    f, cavity, layers, target = inputs(3, 10, 10, 300)
    make = loss("quadrature", 21)
    got = vmap(grad_and_value(make))((f, layers, target), cavity)
    assert_near(got, vmap(grad_and_value(make))(exact((f, layers, target)), cavity))


def test_second_derivatives_are_those_of_the_plain_formula():
    def length(learned, cavity):
        found = torch.utils._pytree.tree_leaves(grad(loss())(learned, cavity))
        return sum(value.square().sum() for value in found)

    f, cavity, layers, target = inputs(3, 7, 5, 33)
    got = vmap(grad(length))((f, layers, target), cavity)
    assert_near(got, vmap(grad(length))(exact((f, layers, target)), cavity), 1e-4)


def test_what_is_not_a_number_stays_so():
    f, cavity, layers, target = inputs(2, 10, 10, 300)
    f[1, 3] = float("nan")
    slopes, value = vmap(grad_and_value(loss()))((f, layers, target), cavity)
    assert value.isnan().tolist() == [False, True]
    assert slopes[0].isnan().any(1).tolist() == [False, True]


def test_other_moments_and_numbers_take_the_plain_formula():
    f, _, layers, target = inputs(1, 10, 10, 300)
    args = f[0], {name: value[0] for name, value in layers.items()}, target[0]
    for name in ("thm2", "logz", "probit"):
        assert not propagation.has_form(*args, make_slopes(name))
    assert not propagation.has_form(*exact(args), make_slopes("trapezoid"))
    assert not propagation.has_form(*args, make_slopes("quadrature", 2000))
    big = npn.initial(10, 200, 5, 0.1, torch.Generator(), torch.float32)
    big = {name: value.cuda() for name, value in big.items()}
    assert not propagation.has_form(args[0], big, args[2], make_slopes("trapezoid"))


LAYERS = [
    (50, 10, 512, 10),
    (3, 150, 300, 7),
    (1, 1, 1, 1),
    (2, 3, 1000, 200),
    (2, 10, 37, 10),
    (2, 64, 70, 64),
]


def layer(clients: int, samples: int, features: int, outputs: int):
    """Return ((x, weight, bias), mask), with clients in front; one has fewer samples, one none."""
    make = torch.Generator().manual_seed(0)
    shapes = ((samples, features), (features, outputs), (outputs,))
    learned = tuple(torch.randn(clients, *s, generator=make).cuda() for s in shapes)
    mask = torch.ones(clients, samples).cuda()
    mask[-1, samples // 2 :] = 0
    if clients > 2:
        mask[1] = 0
    return learned, mask


@pytest.mark.parametrize("sizes", LAYERS)
def test_a_layers_mean_over_a_batch_is_that_of_the_plain_formula(sizes):
    learned, mask = layer(*sizes)
    assert meanlayer.has_form(*(one[0] for one in learned), mask[0])

    def loss(learned, mask):
        return meanlayer.layer_mean(*learned, mask).square().sum()

    got = vmap(grad_and_value(loss))(learned, mask)
    assert_near(got, vmap(grad_and_value(loss))(exact(learned), mask.double()), 1e-5)


@pytest.mark.parametrize("sizes", LAYERS)
def test_a_step_takes_the_slopes_of_a_layers_mean_without_writing_them(sizes):
    (x, weight, bias), mask = layer(*sizes)
    params, rate = {"weight": weight, "bias": bias}, 0.3

    def value(params, x, mask):
        found = meanlayer.layer_mean(x, params["weight"], params["bias"], mask)
        return found.sin().sum() + params["bias"].square().sum()  # a gradient beside

    want = vmap(grad(value, argnums=(0, 1)))(params, x, mask)
    right = vmap(grad(value, argnums=(0, 1)))(exact(params), x.double(), mask.double())
    with products.products(params) as left:
        found, to_x = vmap(grad(value, argnums=(0, 1)))(params, x, mask)
    assert_near(to_x, want[1], 1e-6)
    assert len(left.found) == 1
    others = left.others(found)
    assert others.keys() == {"bias"}
    after = {name: params[name] - rate * slope for name, slope in want[0].items()}
    moved = {name: rate * slope for name, slope in right[0].items()}
    before = {name: value.clone() for name, value in params.items()}
    left.descend(rate)
    params["bias"].sub_(rate * others["bias"])
    assert_near(params, after, 1e-6)
    assert_near({name: before[name] - params[name] for name in params}, moved, 1e-4)


def test_steps_of_f_layer_and_regulariser_are_those_of_written_slopes():
    """Both leave a step of their own, which run beside each other; they leave nothing else."""
    (x, weight, bias), mask = layer(50, 10, 512, 10)
    _, cavity, layers, target = inputs(*SIZES["fmnist"])
    start, rate = {**layers, "head": target, "weight": weight / 20, "bias": bias}, 0.01

    def value(params, x, mask, cavity):
        f = meanlayer.layer_mean(x, params["weight"], params["bias"], mask)
        some = {name: params[name] for name in layers}
        return loss()((f, some, params["head"]), cavity)

    def after(leaves: bool):
        params = {name: value.clone() for name, value in start.items()}
        for _ in range(5):
            with products.products(params if leaves else {}) as left:
                found = vmap(grad(value))(params, x, mask, cavity)
            assert len(left.found) == (2 if leaves else 0)
            left.descend(rate)
            for name, slope in left.others(found).items():
                assert not leaves
                params[name].sub_(rate * slope)
        return params

    got, want = after(True), after(False)
    assert_near(got, want, 1e-6)
    for name in ("weight", "bias"):  # the others' moves are near the rounding of what moves
        moved = want[name] - start[name]
        assert float(moved.norm()) > 0
        assert_near(got[name] - start[name], moved, 1e-3)
