"""GPU kernels in Triton for FedNP's regulariser of many clients at once: two for its value and the
slope of f, and one for all other slopes. `maths/propagation.py` has the formulas.

    _front   one program a client: the tilted moments and the hidden layer, with their slopes
    _value   some of a client's P weights a program: their KL_θ, and its slopes in the hidden layer;
             the one that ends last adds them up, and goes on to the slope of f
    _slopes  the same programs for the slopes of the last layer; one more a client for the first

A step of plain gradient descent needs the slope of f at once, and takes the others at its end,
without writing them.

Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

SLOPE, OFFSET = tl.constexpr(4 - 2 * math.sqrt(2)), tl.constexpr(math.log(math.sqrt(2) - 1))
ZETA2 = tl.constexpr(math.pi / 8)
REACH = tl.constexpr(8.0)
MOST_SPREAD = tl.constexpr(25.0)


@triton.jit
def _log1p(x):
    """log(1 + x) for x > −1, without the rounding of 1 + x."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(−x)), without overflow."""
    z = tl.exp(-tl.abs(x))
    return tl.where(x > 0, 1.0, z) / (1.0 + z)


@triton.jit
def _gauss(mean, rho, place, inside):
    """Mean and variance of weights, and σ(ρ); all 0 outside."""
    m = tl.load(mean + place, mask=inside, other=0.0)
    r = tl.load(rho + place, mask=inside, other=0.0)
    z = tl.exp(-tl.abs(r))
    var = tl.where(r > 0, r, 0.0) + _log1p(z)
    return m, tl.where(inside, var, 0.0), tl.where(inside, tl.where(r > 0, 1.0, z) / (1.0 + z), 0.0)


@triton.jit
def _averages(mean, var, f, NODES: tl.constexpr, WIDE: tl.constexpr):
    """At each node (D, WIDE): z, u = 1 − σ(f z), u (1 − u), weights under the tilted Gaussian, u −
    g1, its square less u (1 − u); then g1 and g2 (D,).
    """
    n = tl.arange(0, WIDE)
    t = tl.full((WIDE,), 2 * REACH / (NODES - 1), mean.dtype) * n.to(mean.dtype) - REACH
    e = mean[:, None] + tl.sqrt(var)[:, None] * t[None, :]
    c = f[:, None] * e
    z = tl.exp(-tl.abs(c))
    log_weight = -0.5 * (t * t)[None, :] + tl.where(c > 0, 0.0, c) - _log1p(z)
    log_weight = tl.where((n < NODES)[None, :], log_weight, float("-inf"))
    weight = tl.exp(log_weight - tl.max(log_weight, 1)[:, None])
    weight = weight / tl.sum(weight, 1)[:, None]
    u = tl.where(c > 0, z, 1.0) / (1.0 + z)
    both = z / ((1.0 + z) * (1.0 + z))
    g1 = tl.sum(weight * u, 1)
    away = u - g1[:, None]
    h = away * away - both
    return e, u, both, weight, away, h, g1, tl.sum(weight * h, 1)


@triton.jit
def _tilt(mean, var, f, NODES: tl.constexpr, WIDE: tl.constexpr):
    """Mean and variance of the tilted Gaussian (D,), and their slopes in f."""
    e, u, both, weight, away, h, g1, g2 = _averages(mean, var, f, NODES, WIDE)
    eu = e * u - tl.sum(weight * e * u, 1)[:, None]
    of_g1 = tl.sum(weight * (eu * away - both * e), 1)
    bent = eu * (h - g2[:, None]) - (2.0 * away + 2.0 * u - 1.0) * both * e
    of_g2 = tl.sum(weight * bent, 1)
    low = -1.0 / (4.0 + f * f * var)  # what is not a number stays so, as in torch
    of_g2 = tl.where(g2 < low, 2.0 * f * var * low * low, tl.where(g2 > 0, 0.0, of_g2))
    g2 = tl.where(g2 < low, low, tl.where(g2 > 0, 0.0, g2))
    of_var = var * var * f * (2.0 * g2 + f * of_g2)
    return mean + f * var * g1, var * (1.0 + f * f * var * g2), var * (g1 + f * of_g1), of_var


@triton.jit
def _begin(
    a,
    given,
    shift,
    precision,
    w1m,
    w1r,
    b1m,
    b1r,
    moments,
    hidden,
    ended,
    dim,
    wide,
    NODES: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
):
    """Of f `given`: moments[a] = z_m, z_s, ∂z_m/∂f, ∂z_s/∂f; hidden[a] = mean and variance of the
    hidden layer, the slopes of both in the linear mean, and of both in the linear variance;
    ended[a] = 0.
    """
    tl.store(ended + a, 0)
    d, h = tl.arange(0, D), tl.arange(0, H)
    inside = (d < dim)[:, None] & (h < wide)[None, :]
    m1, v1, _ = _gauss(w1m, w1r, (a * dim + d[:, None]) * wide + h[None, :], inside)
    bm1, bv1, _ = _gauss(b1m, b1r, a * wide + h, h < wide)
    exact = tl.load(precision + a * dim + d, mask=d < dim, other=1.0).to(tl.float64)
    mean = tl.load(shift + a * dim + d, mask=d < dim, other=0.0).to(tl.float64) / exact
    var = (1.0 / exact).to(tl.float32)
    most = tl.sqrt(MOST_SPREAD / var)
    bound = tl.where(given > most, most, tl.where(given < -most, -most, given))
    zm, zv, of_zm, of_zv = _tilt(mean.to(tl.float32), var, bound, NODES, WIDE)
    clipped = (given > most) | (given < -most)
    row = moments + a * 4 * dim + d
    tl.store(row, zm, mask=d < dim)
    tl.store(row + dim, zv, mask=d < dim)
    tl.store(row + 2 * dim, tl.where(clipped, 0.0, of_zm), mask=d < dim)
    tl.store(row + 3 * dim, tl.where(clipped, 0.0, of_zv), mask=d < dim)
    om = tl.sum(zm[:, None] * m1, 0) + bm1
    ov = tl.sum(zv[:, None] * (v1 + m1 * m1) + (zm * zm)[:, None] * v1, 0) + bv1
    one = 1.0 / tl.sqrt(1.0 + ZETA2 * ov)
    two = 1.0 / tl.sqrt(1.0 + ZETA2 * SLOPE * SLOPE * ov)
    p, q = _sigmoid(om * one), _sigmoid(SLOPE * (om + OFFSET) * two)
    of_p, of_q = p * (1.0 - p) * one, q * (1.0 - q) * SLOPE * two
    bend_p = of_p * (-0.5 * ZETA2) * om * one * one
    bend_q = of_q * (-0.5 * ZETA2 * SLOPE * SLOPE) * (om + OFFSET) * two * two
    row = hidden + a * 6 * wide + h
    tl.store(row, p, mask=h < wide)
    tl.store(row + wide, q - p * p, mask=h < wide)
    tl.store(row + 2 * wide, of_p, mask=h < wide)
    tl.store(row + 3 * wide, of_q - 2.0 * p * of_p, mask=h < wide)
    tl.store(row + 4 * wide, bend_p, mask=h < wide)
    tl.store(row + 5 * wide, bend_q - 2.0 * p * bend_p, mask=h < wide)


@triton.jit
def _front(
    f,
    shift,
    precision,
    w1m,
    w1r,
    b1m,
    b1r,
    moments,
    hidden,
    ended,
    dim,
    wide,
    NODES: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
):
    """`_begin` for f as it is given."""
    a, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    given = tl.load(f + a * dim + d, mask=d < dim, other=0.0)
    _begin(
        a,
        given,
        shift,
        precision,
        w1m,
        w1r,
        b1m,
        b1r,
        moments,
        hidden,
        ended,
        dim,
        wide,
        NODES,
        WIDE,
        D,
        H,
    )


@triton.jit
def _of_hidden(a, parts, hidden, wide, blocks, H: tl.constexpr, ROWS: tl.constexpr):
    """The slopes in mean and variance of a client's linear hidden layer, all parts together."""
    h = tl.arange(0, H)
    to_hm, to_hv = tl.zeros((H,), tl.float32), tl.zeros((H,), tl.float32)
    for start in range(0, blocks, ROWS):
        b = start + tl.arange(0, ROWS)
        some = (b < blocks)[:, None] & (h < wide)[None, :]
        part = parts + (a * blocks + b[:, None]) * 2 * wide + h[None, :]
        to_hm += tl.sum(tl.load(part, mask=some, other=0.0, cache_modifier=".cg"), 0)
        to_hv += tl.sum(tl.load(part + wide, mask=some, other=0.0, cache_modifier=".cg"), 0)
    row = hidden + a * 6 * wide + h
    to_om = to_hm * tl.load(row + 2 * wide, mask=h < wide, other=0.0)
    to_om += to_hv * tl.load(row + 3 * wide, mask=h < wide, other=0.0)
    to_ov = to_hm * tl.load(row + 4 * wide, mask=h < wide, other=0.0)
    to_ov += to_hv * tl.load(row + 5 * wide, mask=h < wide, other=0.0)
    return to_om, to_ov


@triton.jit
def _sum(shares, blocks, ROWS: tl.constexpr):
    """The sum of what other programs have written."""
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, blocks, ROWS):
        b = start + tl.arange(0, ROWS)
        total += tl.load(shares + b, mask=b < blocks, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def _of_f(a, w1m, w1r, moments, zm, zv, to_om, to_ov, dim, wide, D: tl.constexpr, H: tl.constexpr):
    """The slope of KL_θ + KL_z in f (D,), from those in the linear hidden layer."""
    d, h = tl.arange(0, D), tl.arange(0, H)
    inside = (d < dim)[:, None] & (h < wide)[None, :]
    m1, v1, _ = _gauss(w1m, w1r, (a * dim + d[:, None]) * wide + h[None, :], inside)
    to_zm = tl.sum(m1 * to_om[None, :] + 2.0 * zm[:, None] * v1 * to_ov[None, :], 1)
    to_zv = tl.sum((v1 + m1 * m1) * to_ov[None, :], 1)
    of_zm = tl.load(moments + (a * 4 + 2) * dim + d, mask=d < dim, other=0.0)
    of_zv = tl.load(moments + (a * 4 + 3) * dim + d, mask=d < dim, other=0.0)
    return (to_zm + zm) * of_zm + (to_zv + 0.5 * (zv - 1.0) / zv) * of_zv


@triton.jit
def _value(
    w1m,
    w1r,
    w2m,
    w2r,
    b2m,
    b2r,
    target,
    moments,
    hidden,
    ended,
    shares,
    parts,
    values,
    to_f,
    dim,
    wide,
    outputs,
    blocks,
    EPSILON: tl.constexpr,
    STRENGTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
):
    """shares[a, j] = STRENGTH·(KL_θ of some weights; the first also KL_z), parts[a, j] = the slopes
    of that KL_θ in mean and variance of the hidden layer. Of all parts together: values[a], and
    to_f[a], its slope.
    """
    a, j = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    d, h, p = tl.arange(0, D), tl.arange(0, H), j * P + tl.arange(0, P)
    within = (h < wide)[:, None] & (p < outputs)[None, :]
    place = (a * wide + h[:, None]) * outputs + p[None, :]
    m2, v2, _ = _gauss(w2m, w2r, place, within)
    bm2, bv2, _ = _gauss(b2m, b2r, a * outputs + p, p < outputs)
    wanted = tl.load(target + a * outputs + p, mask=p < outputs, other=0.0)
    hm = tl.load(hidden + a * 6 * wide + h, mask=h < wide, other=0.0)
    hv = tl.load(hidden + (a * 6 + 1) * wide + h, mask=h < wide, other=0.0)
    zm = tl.load(moments + a * 4 * dim + d, mask=d < dim, other=0.0)
    zv = tl.load(moments + (a * 4 + 1) * dim + d, mask=d < dim, other=1.0)
    far = tl.sum(hm[:, None] * m2, 0) + bm2 - wanted
    s = tl.sum(hv[:, None] * (v2 + m2 * m2) + (hm * hm)[:, None] * v2, 0) + bv2
    s = tl.where(p < outputs, s, EPSILON)
    ratio = (s - EPSILON) / EPSILON
    total = tl.sum(ratio - _log1p(ratio) + far * far / EPSILON, 0)
    if j == 0:
        total += tl.sum(zm * zm + ((zv - 1.0) - tl.log(zv)), 0)
    tl.store(shares + a * blocks + j, 0.5 * STRENGTH * total)
    to_mean, to_var = far / EPSILON, ratio / (2.0 * s)
    to_hm = tl.sum(to_mean[None, :] * m2 + 2.0 * hm[:, None] * to_var[None, :] * v2, 1)
    to_hv = tl.sum(to_var[None, :] * (v2 + m2 * m2), 1)
    row = parts + (a * blocks + j) * 2 * wide + h
    tl.store(row, to_hm, mask=h < wide)
    tl.store(row + wide, to_hv, mask=h < wide)
    tl.debug_barrier()  # all threads have written before one counts
    if tl.atomic_add(ended + a, 1, sem="acq_rel") == blocks - 1:
        tl.store(values + a, _sum(shares + a * blocks, blocks, ROWS))
        to_om, to_ov = _of_hidden(a, parts, hidden, wide, blocks, H, ROWS)
        found = _of_f(a, w1m, w1r, moments, zm, zv, to_om, to_ov, dim, wide, D, H)
        tl.store(to_f + a * dim + d, STRENGTH * found, mask=d < dim)


@triton.jit
def _put(to, place, value, inside, rate, DESCEND: tl.constexpr):
    """to[place] = value, or with DESCEND to[place] −= rate·value."""
    if DESCEND:
        value = tl.load(to + place, mask=inside, other=0.0) - rate * value
    tl.store(to + place, value, mask=inside)


@triton.jit
def _slopes(
    g,
    w1m,
    w1r,
    b1r,
    w2m,
    w2r,
    b2m,
    b2r,
    target,
    moments,
    hidden,
    parts,
    to_w1m,
    to_w1r,
    to_b1m,
    to_b1r,
    to_w2m,
    to_w2r,
    to_b2m,
    to_b2r,
    to_target,
    dim,
    wide,
    outputs,
    blocks,
    rate,
    EPSILON: tl.constexpr,
    STRENGTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    DESCEND: tl.constexpr,
):
    """The slopes of the last layer and the target, some of a client's weights a program; the first
    program of a client has those of the first layer. DESCEND: a step down all of them.
    """
    pid = tl.program_id(0)
    a, j = (pid // (blocks + 1)).to(tl.int64), (pid % (blocks + 1)).to(tl.int64)
    h = tl.arange(0, H)
    scale = STRENGTH * tl.load(g + a)
    of_hidden = hidden + a * 6 * wide + h
    if j == 0:
        d = tl.arange(0, D)
        to_om, to_ov = _of_hidden(a, parts, hidden, wide, blocks, H, ROWS)
        to_om, to_ov = scale * to_om, scale * to_ov
        of_moments = moments + a * 4 * dim + d
        zm = tl.load(of_moments, mask=d < dim, other=0.0)
        zv = tl.load(of_moments + dim, mask=d < dim, other=1.0)
        inside = (d < dim)[:, None] & (h < wide)[None, :]
        first = (a * dim + d[:, None]) * wide + h[None, :]
        m1, _, of_rho = _gauss(w1m, w1r, first, inside)
        cross = 2.0 * zv[:, None] * m1 * to_ov[None, :] + zm[:, None] * to_om[None, :]
        _put(to_w1m, first, cross, inside, rate, DESCEND)
        to_v1 = (zv + zm * zm)[:, None] * to_ov[None, :]
        _put(to_w1r, first, to_v1 * of_rho, inside, rate, DESCEND)
        of_bias = _sigmoid(tl.load(b1r + a * wide + h, mask=h < wide, other=0.0))
        _put(to_b1m, a * wide + h, to_om, h < wide, rate, DESCEND)
        _put(to_b1r, a * wide + h, to_ov * of_bias, h < wide, rate, DESCEND)
    else:
        p = (j - 1) * P + tl.arange(0, P)
        within = (h < wide)[:, None] & (p < outputs)[None, :]
        place = (a * wide + h[:, None]) * outputs + p[None, :]
        m2, v2, of_rho2 = _gauss(w2m, w2r, place, within)
        bm2, bv2, of_bias2 = _gauss(b2m, b2r, a * outputs + p, p < outputs)
        wanted = tl.load(target + a * outputs + p, mask=p < outputs, other=0.0)
        hm = tl.load(of_hidden, mask=h < wide, other=0.0)
        hv = tl.load(of_hidden + wide, mask=h < wide, other=0.0)
        s = tl.sum(hv[:, None] * (v2 + m2 * m2) + (hm * hm)[:, None] * v2, 0) + bv2
        s = tl.where(p < outputs, s, EPSILON)
        to_mean = scale * (tl.sum(hm[:, None] * m2, 0) + bm2 - wanted) / EPSILON
        to_var = scale * (s - EPSILON) / (2.0 * EPSILON * s)
        last = hm[:, None] * to_mean[None, :] + 2.0 * hv[:, None] * m2 * to_var[None, :]
        _put(to_w2m, place, last, within, rate, DESCEND)
        spread = (hv + hm * hm)[:, None] * to_var[None, :]
        _put(to_w2r, place, spread * of_rho2, within, rate, DESCEND)
        _put(to_b2m, a * outputs + p, to_mean, p < outputs, rate, DESCEND)
        _put(to_b2r, a * outputs + p, to_var * of_bias2, p < outputs, rate, DESCEND)
        _put(to_target, a * outputs + p, -to_mean, p < outputs, rate, DESCEND)
