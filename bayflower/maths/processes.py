"""Gaussian processes for classes: mean-field Pólya–Gamma inference at the nodes of a tree.

A binary tree over K classes is a sign matrix T (K − 1, K): row r is a node, +1 a class on its left,
−1 on its right, 0 elsewhere. A node says "left" with probability σ(f_r(u)), f_r ~ GP(0, k). With
one Pólya–Gamma variable a sample its posterior is Gaussian:

    κ_i = ½ T_{r,y_i},   B = I + √Ω K √Ω,   M = √Ω B⁻¹ √Ω,   a = κ − M K κ                  [eq. 1]
    m = K a,   S_ii = K_ii − (K M K)_ii,   c_i = √(m_i² + S_ii),   ω_i = tanh(c_i/2) / 2c_i  [eq. 2]
    f_* ~ N(k_*ᵀ a, k_** − k_*ᵀ M k_*),   p = E σ(f_*) by Gauss–Hermite                      [eq. 3]
    p_c = Π_r p_r^[T_rc = 1] (1 − p_r)^[T_rc = −1]                                           [eq. 4]

Nothing is divided by ω: a sample outside a node, or padding, has ω = κ = 0 and changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..stacked.constants import constant

POINTS = 20  # of the quadrature
SMALL = 1e-4  # below it tanh(c/2)/2c is its series
ROUNDS = 8  # of 2-means
PIECE = 2**22  # numbers of the matrices that are taken apart at a time
EVEN = 1e-6  # share of even classes in a prediction
TINY = 1e-12


class Kernel(NamedTuple):
    """k(u, u') = scale · exp(−‖u − u'‖² / 2 length²), and jitter for a sample with itself."""

    scale: float
    length: float
    jitter: float

    @property
    def own(self) -> float:
        """Return the kernel of a sample with itself."""
        return self.scale + self.jitter

    def between(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the kernel of two sets of other samples (N, M)."""
        far = (u.square().sum(1)[:, None] + v.square().sum(1)[None] - 2 * u @ v.mT).clamp(min=0)
        return self.scale * torch.exp(-far / (2 * self.length**2))

    def within(self, u: Tensor) -> Tensor:
        """Return the kernel of one set of samples (N, N)."""
        return self.jittered(self.between(u, u))

    def jittered(self, cross: Tensor) -> Tensor:
        """Return the kernel of one set of samples from that of two sets with the same samples."""
        return cross + self.jitter * torch.eye(len(cross), dtype=cross.dtype, device=cross.device)


class Fit(NamedTuple):
    """The posterior of nodes at their samples: weights a and Pólya–Gamma means ω, both (R, N)."""

    weights: Tensor
    omega: Tensor


class Known(NamedTuple):
    """What processes know: their samples, the samples' sides, and the tree."""

    features: Tensor  # (N, D)
    side: Tensor  # (R, N): +1 left, −1 right, 0 not below the node, or padding
    omega: Tensor  # (R, N)
    signs: Tensor  # (R, K)
    counts: Tensor  # (K,): samples of each class


def solved(gram: Tensor, omega: Tensor, right: Tensor) -> Tensor:
    """Return M · right for nodes: gram (N, N), omega (R, N), right (R, N, P) [eq. 1]."""
    root = omega.sqrt()
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    lower = torch.linalg.cholesky_ex(eye + root[:, :, None] * gram * root[:, None, :])[0]
    half = torch.linalg.solve_triangular(lower, root[:, :, None] * right, upper=False)
    return root[:, :, None] * torch.linalg.solve_triangular(lower.mT, half, upper=True)


def weights(gram: Tensor, omega: Tensor, kappa: Tensor) -> Tensor:
    """Return a for nodes with targets kappa (R, N) [eq. 1]."""
    return kappa - solved(gram, omega, (kappa @ gram)[:, :, None])[:, :, 0]


def moments(gram: Tensor, omega: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances of the nodes at their own samples (R, N) [eq. 2]."""
    inner = solved(gram, omega, gram.expand(len(omega), *gram.shape))
    spread = gram.diagonal() - (gram * inner).sum(1)
    found = kappa - (inner @ kappa[:, :, None])[:, :, 0]  # `weights`, from what is solved already
    return found @ gram, spread.clamp(min=0)


def means(c: Tensor) -> Tensor:
    """Return E ω = tanh(c/2) / 2c."""
    safe = c.clamp(min=SMALL)
    return torch.where(c < SMALL, 0.25 - c.square() / 48, torch.tanh(safe / 2) / (2 * safe))


def fit(gram: Tensor, kappa: Tensor, within: Tensor, iterations: int) -> Fit:
    """Return the posterior of nodes whose samples `within` (R, N) marks; omega has no derivative,
    the weights have.
    """
    fixed, omega = gram.detach(), 0.25 * within
    for _ in range(iterations):
        mean, spread = moments(fixed, omega, kappa)
        omega = within * means((mean.square() + spread).sqrt())
    return Fit(weights(gram, omega, kappa), omega)


def predicted(gram: Tensor, cross: Tensor, own: float, fitted: Fit) -> tuple[Tensor, Tensor]:
    """Return means and variances (R, Q) of nodes at other samples: cross (N, Q), own = k_**."""
    inner = solved(gram, fitted.omega, cross.expand(len(fitted.omega), *cross.shape))
    spread = own - (cross * inner).sum(1)
    return fitted.weights @ cross, spread.clamp(min=1e-10)


def left(mean: Tensor, spread: Tensor) -> Tensor:
    """Return E σ(N(mean, spread)) [eq. 3]."""
    points, shares = quadrature(mean.dtype, mean.device)
    return (torch.sigmoid(mean[..., None] + spread.sqrt()[..., None] * points) * shares).sum(-1)


@constant(maxsize=8)
def quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return points and shares for means under a standard normal."""
    points, shares = np.polynomial.hermite_e.hermegauss(POINTS)
    made = torch.tensor(np.stack([points, shares / shares.sum()]), dtype=dtype, device=device)
    return made[0], made[1]


def at_a_time(samples: int) -> int:
    """Return how many nodes are taken at a time: their matrices are samples × samples."""
    return max(1, PIECE // max(samples * samples, 1))


def derived(kernel: Kernel, features: Tensor, side: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights (R, N) and M (R, N, N) of all nodes, in float64 [eq. 1]."""
    u, wide = unit(features.double()), omega.double()
    gram, eye = kernel.within(u), torch.eye(len(u), dtype=torch.float64, device=u.device)
    inverse = torch.cat(
        [
            solved(gram, part, eye.expand(len(part), *eye.shape))
            for part in wide.split(at_a_time(len(u)))
        ]
    )
    kappa = side.double() / 2
    return kappa - (inverse @ (kappa @ gram)[:, :, None])[:, :, 0], inverse


def probabilities(
    kernel: Kernel, known: Known, z: Tensor, made: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return class probabilities (Q, K) of other samples with features z, in float64, the variance
    of their processes included [eq. 3] [eq. 4]; `made` is what `derived` gives, where it is kept.
    A class without samples gets EVEN / K.
    """
    u, new = unit(known.features.double()), unit(z.double())
    cross, said = kernel.between(u, new), []
    if made is not None:
        spread = kernel.own - (cross * (made[1] @ cross)).sum(1)
        said.append(left(made[0] @ cross, spread.clamp(min=1e-10)))
    else:
        gram, size = kernel.within(u), at_a_time(len(u))
        both = zip(known.side.double().split(size), known.omega.double().split(size), strict=True)
        for part, omega in both:
            fitted = Fit(weights(gram, omega, part / 2), omega)
            said.append(left(*predicted(gram, cross, kernel.own, fitted)))
    signs = known.signs.double()
    found = classes(signs, settled(torch.cat(said), signs, known.counts))
    return (1 - EVEN) * found / found.sum(1, keepdim=True) + EVEN / found.shape[1]


def unit(z: Tensor) -> Tensor:
    """Return rows of length 1; a row of zeros stays."""
    return z / (z.square().sum(1, keepdim=True) + TINY**2).sqrt()


def classes(signs: Tensor, said: Tensor) -> Tensor:
    """Return class probabilities (Q, K) from the nodes' (R, Q) [eq. 4]."""
    side = signs[:, None, :]
    chosen = torch.where(side > 0, said[:, :, None], 1 - said[:, :, None])
    return torch.where(side == 0, torch.ones_like(chosen), chosen).prod(0)


def settled(said: Tensor, signs: Tensor, counts: Tensor) -> Tensor:
    """Return what nodes say (R, Q), where a node with samples on one side only says that side, and
    one without samples ½.
    """
    there = (counts > 0).to(said.dtype)
    on = ((signs > 0).to(said) * there).sum(1) > 0, ((signs < 0).to(said) * there).sum(1) > 0
    only = torch.where(on[0] & ~on[1], 1.0, torch.where(on[1] & ~on[0], 0.0, 0.5)).to(said)
    return torch.where((on[0] & on[1])[:, None], said, only[:, None])


def halves(number: int) -> np.ndarray:
    """Return the tree that halves the list of classes, as signs (K − 1, K)."""
    rows: list[np.ndarray] = []

    def split(low: int, high: int) -> None:
        if high - low < 2:
            return
        middle, row = (low + high + 1) // 2, np.zeros(number)
        row[low:middle], row[middle:high] = 1, -1
        rows.append(row)
        split(low, middle)
        split(middle, high)

    split(0, number)
    return np.stack(rows)


def grown(centres: Tensor, counts: Tensor) -> Tensor:
    """Return a tree as signs (K − 1, K): groups of classes are split by 2-means of their mean
    features (K, D), the largest group first. Classes without samples have no say in the means.
    """
    number, there = len(centres), (counts > 0).to(centres.dtype)
    group, rows = torch.zeros_like(counts, dtype=torch.int64), []
    for made in range(1, number):
        sizes = torch.stack([(group == g).sum() for g in range(made)])
        inside = group == sizes.argmax()
        right = halved(centres, there, inside)
        rows.append(torch.where(inside, torch.where(right, -1, 1), 0))
        group = torch.where(inside & right, torch.full_like(group, made), group)
    return torch.stack(rows).to(centres.dtype)


def halved(centres: Tensor, there: Tensor, inside: Tensor) -> Tensor:
    """Return which classes of a group (K,) go to the right: 2-means from the two that lie farthest
    apart, each of which keeps its side.
    """
    number = len(centres)
    known = inside & (there > 0)
    places = torch.arange(number, device=inside.device)
    far = (centres[:, None] - centres[None]).square().sum(-1)
    pairs = inside[:, None] & inside[None] & (places[:, None] < places[None])
    score = torch.where(known[:, None] & known[None], far + 2, torch.ones_like(far)) * pairs
    best = score.flatten().argmax()
    ends = (places == best // number), (places == best % number)
    middle = [(end.to(centres)[:, None] * centres).sum(0) for end in ends]
    right = ends[1]
    for _ in range(ROUNDS):
        apart = [(centres - point).square().sum(1) for point in middle]
        right = ((apart[1] < apart[0]) & ~ends[0]) | ends[1]
        for place, side in enumerate((inside & ~right, inside & right)):
            share = side.to(centres) * there
            total = share.sum()
            mean = (share[:, None] * centres).sum(0) / total.clamp(min=1)
            middle[place] = torch.where(total > 0, mean, middle[place])
    return right & inside
