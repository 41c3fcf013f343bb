"""FedMAP's synthetic binary data (arXiv 2405.19000v1, Appendix B.1, repaired).

    paper      here               shape, meaning
    Q=[B B⊥]   basis              (30, 30) orthogonal, one for all clients; the first 4 columns
                                  carry the class
    u          radial part        (4,) class 0: N(0, 2I); class 1: r·v, v uniform on the sphere, r ~
                                  N(8, variance 2)
    v⊥         nuisance           (26,) N(0, s²I)
    A_k, b_k   transform          (30, 30) iid N(0, 1); (30,) 5k·N(0, I), k counted from 1

Departs: E-M6: the projection is Bᵀx, the radius of class 1 is a scalar, B is drawn once and not for
each client, A_k and b_k (missing in the paper) are as above, and s² is 9 by default where the text
prints 2. A class has an exact share of a client's samples (half, or 85 % of class 0 in the second
half of the clients under label skew), not a binomial one. For other than ten clients "the first
five" is the first half, the larger one if the number is odd. Sample i of client k depends on (seed,
k, i) and its class alone: the number of clients matters only through the half in which k lies.
"""

from __future__ import annotations

import numpy as np

from .batches import rng

DIMENSION = 30
INTRINSIC = 4
SIZE, SMALL_SIZE = 2000, 500
SKEWED_SHARE = 0.85  # of class 0
NUM_CLASSES = 2


def basis(seed: int) -> np.ndarray:
    """Return Q (30, 30), uniform among orthogonal matrices."""
    q, r = np.linalg.qr(rng(seed, "synthetic/basis").standard_normal((DIMENSION, DIMENSION)))
    # without the signs the distribution would depend on the QR routine
    return q * np.sign(np.diag(r))


def shape_of_client(index: int, clients: int, scenario: str) -> tuple[int, float]:
    """Return (samples, share of class 0) of client `index`, counted from 0."""
    second_half = index >= (clients + 1) // 2
    size = SMALL_SIZE if scenario == "quantity" and second_half else SIZE
    return size, SKEWED_SHARE if scenario == "label" and second_half else 0.5


def latent(
    seed: int, index: int, size: int, share: float, nuisance_variance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (x (size, 30), y (size,)) before the client's transform: x = B u + B⊥ v⊥."""
    y = np.ones(size, np.int64)
    y[: int(share * size + 0.5)] = 0
    rng(seed, "synthetic/labels", index).shuffle(y)
    # Draws are always for SIZE samples, so that a smaller client holds the first samples of the
    # larger one.
    draw = rng(seed, "synthetic/samples", index)
    near = np.sqrt(2.0) * draw.standard_normal((SIZE, INTRINSIC))
    direction = draw.standard_normal((SIZE, INTRINSIC))
    radius = 8.0 + np.sqrt(2.0) * draw.standard_normal((SIZE, 1))
    nuisance = np.sqrt(nuisance_variance) * draw.standard_normal((SIZE, DIMENSION - INTRINSIC))
    far = radius * direction / np.linalg.norm(direction, axis=1, keepdims=True)
    u = np.where(y[:, None] == 0, near[:size], far[:size])
    return np.concatenate([u, nuisance[:size]], axis=1) @ basis(seed).T, y


def transform(seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (A_k (30, 30), b_k (30,)) of client `index`, counted from 0: k = index + 1."""
    draw = rng(seed, "synthetic/transform", index)
    return draw.standard_normal((DIMENSION, DIMENSION)), 5.0 * (index + 1) * draw.standard_normal(
        DIMENSION
    )


def client_samples(
    seed: int, index: int, clients: int, scenario: str, nuisance_variance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (A_kᵀ x + b_k (n, 30) in float64, y (n,)) of client `index`, not yet standardised."""
    size, share = shape_of_client(index, clients, scenario)
    x, y = latent(seed, index, size, share, nuisance_variance)
    matrix, offset = transform(seed, index)
    return x @ matrix + offset, y
