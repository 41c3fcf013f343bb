"""GPU kernels in Triton for a linear layer of many networks at once, with the activation after it.

    ahead     out[b, o] = bent(Σ_k x[b, k] w[o, k] + bias[o])      bent(v) = v if v > 0 else slope·v
    weights   ∂w[o, k]  = Σ_b s[b, o] x[b, k],  ∂bias[o] = Σ_b s[b, o]
    input     ∂x[b, k]  = Σ_o s[b, o] w[o, k]

s = ∂out where out > 0, else slope·∂out. A batch of one client is small, so that the time is that of
reading and writing weights: each is read once, in its own type, also where products are bfloat16.
PRECISION is that of products of float32: `tf32`, or `tf32x3`, three products in TF32 that have
float32's digits. Only imported where a CUDA device and Triton are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import routes


@triton.jit
def _ahead(
    x,
    w,
    bias,
    out,
    samples,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BB: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
):
    """out[a, b, o] for a block of outputs and of samples."""
    a = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    x += a * samples * inputs
    w += a * outputs * inputs
    real, known = b < samples, o < outputs
    acc = tl.zeros((BB, BO), dtype=tl.float32)
    for start in range(0, inputs, BK):
        k = start + tl.arange(0, BK)
        there = k < inputs
        weights = tl.load(
            w + o[:, None] * inputs + k[None, :], mask=known[:, None] & there[None, :], other=0.0
        )
        values = tl.load(
            x + b[:, None] * inputs + k[None, :], mask=real[:, None] & there[None, :], other=0.0
        )
        if LOW:
            weights, values = weights.to(tl.bfloat16), values.to(tl.bfloat16)
        acc = tl.dot(values, tl.trans(weights), acc, input_precision=PRECISION)
    if BIAS:
        more = tl.load(bias + a * outputs + o, mask=known, other=0.0)
        acc += more[None, :].to(tl.float32)
    acc = tl.where(acc > 0, acc, acc * SLOPE)
    place = out + (a * samples + b[:, None]) * outputs + o[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & known[None, :])


@triton.jit
def _slopes(g, out, b, o, samples, outputs, LOW: tl.constexpr, SLOPE: tl.constexpr):
    """s[b, o] of one client."""
    place = b[:, None] * outputs + o[None, :]
    inside = (b < samples)[:, None] & (o < outputs)[None, :]
    found = tl.load(g + place, mask=inside, other=0.0)
    if SLOPE != 1.0:
        sign = tl.load(out + place, mask=inside, other=0.0)
        found = tl.where(sign > 0, found, (found * SLOPE).to(found.dtype))
    return found.to(tl.bfloat16) if LOW else found


@triton.jit
def _values(x, b, k, samples, inputs, LOW: tl.constexpr):
    """x[b, k] of one client."""
    inside = (b < samples)[:, None] & (k < inputs)[None, :]
    found = tl.load(x + b[:, None] * inputs + k[None, :], mask=inside, other=0.0)
    return found.to(tl.bfloat16) if LOW else found


@triton.jit
def _put(acc, to_weight, a, o, k, outputs, inputs, rate, DESCEND: tl.constexpr):
    """Write a block of the weights' gradient, or subtract it from the weights."""
    inside = (o < outputs)[:, None] & (k < inputs)[None, :]
    place = to_weight + (a * outputs + o[:, None]) * inputs + k[None, :]
    if DESCEND:
        acc = tl.load(place, mask=inside, other=0.0) - rate * acc
    tl.store(place, acc.to(to_weight.dtype.element_ty), mask=inside)


@triton.jit
def _weights(
    x,
    g,
    out,
    to_weight,
    to_bias,
    samples,
    outputs,
    inputs,
    turns,
    rate,
    DESCEND: tl.constexpr,
    ONCE: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BB: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
):
    """to_weight[a, o, k] for a block of outputs and `turns` blocks of inputs, and to_bias[a, o];
    with DESCEND these are the parameters, which go down by `rate` times that. ONCE: a block has all
    samples.
    """
    a = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    b = tl.arange(0, BB)
    x += a * samples * inputs
    g += a * samples * outputs
    out += a * samples * outputs
    more = tl.zeros((BO,), dtype=tl.float32)
    if ONCE:
        slopes = _slopes(g, out, b, o, samples, outputs, LOW, SLOPE)
        if BIAS:
            more = tl.sum(slopes.to(tl.float32), 0)
        turned = tl.trans(slopes)
        for turn in range(turns):
            k = (tl.program_id(0) * turns + turn) * BK + tl.arange(0, BK)
            values = _values(x, b, k, samples, inputs, LOW)
            acc = tl.dot(turned, values, input_precision=PRECISION)
            _put(acc, to_weight, a, o, k, outputs, inputs, rate, DESCEND)
    else:
        k = tl.program_id(0) * BK + tl.arange(0, BK)
        acc = tl.zeros((BO, BK), dtype=tl.float32)
        for start in range(0, samples, BB):
            slopes = _slopes(g, out, start + b, o, samples, outputs, LOW, SLOPE)
            values = _values(x, start + b, k, samples, inputs, LOW)
            acc = tl.dot(tl.trans(slopes), values, acc, input_precision=PRECISION)
            if BIAS:
                more += tl.sum(slopes.to(tl.float32), 0)
        _put(acc, to_weight, a, o, k, outputs, inputs, rate, DESCEND)
    if BIAS:
        first = (o < outputs) & (tl.program_id(0) == 0)
        if DESCEND:
            more = tl.load(to_bias + a * outputs + o, mask=first, other=0.0) - rate * more
        tl.store(to_bias + a * outputs + o, more.to(to_bias.dtype.element_ty), mask=first)


@triton.jit
def _input(
    g,
    out,
    w,
    to_x,
    samples,
    outputs,
    inputs,
    LOW: tl.constexpr,
    SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BB: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
):
    """to_x[a, b, k] for a block of samples and inputs."""
    a = tl.program_id(2).to(tl.int64)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    w += a * outputs * inputs
    g += a * samples * outputs
    out += a * samples * outputs
    there = k < inputs
    acc = tl.zeros((BB, BK), dtype=tl.float32)
    for start in range(0, outputs, BO):
        o = start + tl.arange(0, BO)
        slopes = _slopes(g, out, b, o, samples, outputs, LOW, SLOPE)
        weights = tl.load(
            w + o[:, None] * inputs + k[None, :],
            mask=(o < outputs)[:, None] & there[None, :],
            other=0.0,
        )
        if LOW:
            weights = weights.to(tl.bfloat16)
        acc = tl.dot(slopes, weights, acc, input_precision=PRECISION)
    place = to_x + (a * samples + b[:, None]) * inputs + k[None, :]
    inside = (b < samples)[:, None] & there[None, :]
    tl.store(place, acc.to(to_x.dtype.element_ty), mask=inside)


def ahead(x: Tensor, weight: Tensor, bias: Tensor | None, slope: float, low: bool) -> Tensor:
    """Return bent(x Wᵀ + b), (A, B, O), for x (A, B, K), weight (A, O, K), bias (A, O)."""
    x, weight = x.contiguous(), weight.contiguous()
    clients, samples, inputs = x.shape
    outputs = weight.shape[1]
    out = x.new_empty(clients, samples, outputs, dtype=torch.bfloat16 if low else x.dtype)
    tile = routes.linear_ahead(clients, samples, outputs, inputs)
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(samples, tile.samples), clients)
    _ahead[grid](
        *(x, weight, x if bias is None else bias.contiguous(), out, samples, outputs, inputs),
        BIAS=bias is not None,
        LOW=low,
        SLOPE=slope,
        **tile.options(),
    )
    return out


def weights_slope(
    x: Tensor, g: Tensor, out: Tensor, bias: bool, dtype: torch.dtype, slope: float, low: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight (A, O, K) and bias (A, O), the second empty without `bias`."""
    clients, outputs = len(g), g.shape[2]
    to_weight = x.new_empty(clients, outputs, x.shape[2], dtype=dtype)
    to_bias = x.new_empty(clients, outputs if bias else 0, dtype=dtype)
    to_weights(x, g, out, to_weight, to_bias if bias else None, slope, low)
    return to_weight, to_bias


def descend(
    x: Tensor,
    g: Tensor,
    out: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: float,
    low: bool,
    rate: float,
) -> None:
    """Subtract `rate` times the gradients from weight (A, O, K) and bias (A, O), in place."""
    to_weights(x, g, out, weight, bias, slope, low, rate)


def to_weights(
    x: Tensor,
    g: Tensor,
    out: Tensor,
    to_weight: Tensor,
    to_bias: Tensor | None,
    slope: float,
    low: bool,
    rate: float | None = None,
) -> None:
    """Write the gradients to `to_weight` and `to_bias`, or with a rate subtract them there."""
    x, g, out = x.contiguous(), g.contiguous(), out.contiguous()
    clients, samples, inputs = x.shape
    outputs = g.shape[2]
    step = rate is not None
    tile, turns = routes.linear_weights(clients, samples, outputs, inputs, step)
    blocks = triton.cdiv(triton.cdiv(inputs, tile.inputs), turns)
    _weights[(blocks, triton.cdiv(outputs, tile.outputs), clients)](
        *(x, g, out, to_weight, x if to_bias is None else to_bias),
        *(samples, outputs, inputs, turns, 0.0 if rate is None else rate),
        DESCEND=step,
        ONCE=samples <= tile.samples,
        BIAS=to_bias is not None,
        LOW=low,
        SLOPE=slope,
        **tile.options(),
    )


def input_slope(
    g: Tensor, out: Tensor, weight: Tensor, slope: float, dtype: torch.dtype, low: bool
) -> Tensor:
    """Return the gradient of x, (A, B, K)."""
    g, out, weight = g.contiguous(), out.contiguous(), weight.contiguous()
    clients, samples, outputs = g.shape
    inputs = weight.shape[2]
    to_x = g.new_empty(clients, samples, inputs, dtype=dtype)
    tile = routes.linear_input(clients, samples, outputs, inputs)
    grid = (triton.cdiv(inputs, tile.inputs), triton.cdiv(samples, tile.samples), clients)
    _input[grid](
        *(g, out, weight, to_x, samples, outputs, inputs),
        LOW=low,
        SLOPE=slope,
        **tile.options(),
    )
    return to_x
