"""Attention in plain operations: it can be stacked, differentiated any number of times, and its
dropout takes the numbers of a step. The arguments are those of torch's functions.

torch's own kernels for attention have no second derivative and no form for stacks of networks.

    symbol   here      meaning
    q, k, v  query …   (…, L, E), (…, S, E), (…, S, E'): rows of queries, keys and values
    A        weights   softmax(q kᵀ / √E + mask), rows of numbers that sum to 1
    y        result    A v, with A behind dropout
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .randomly import mask as dropped


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return A v; a query that may look nowhere gets 0."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(times, -3) for one in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores + additive(attn_mask, scores.dtype)
        nowhere = (scores == -math.inf).all(-1, keepdim=True)
        # softmax of a row of −∞ is not a number, and neither is its slope: it sees zeros instead
        weights = torch.softmax(scores.masked_fill(nowhere, 0.0), -1).masked_fill(nowhere, 0.0)
    else:
        weights = torch.softmax(scores, -1)
    return behind_dropout(weights, dropout_p) @ value


def random_scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return A v if A is behind dropout."""
    if not dropout_p:
        return NotImplemented
    return scaled_dot_product(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores, of one that says where to look."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


def forbidden(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores, of one that says where not to look."""
    return additive(~mask if mask.dtype == torch.bool else mask, dtype)


def behind_dropout(weights: Tensor, p: float) -> Tensor:
    """Return the weights, some of them dropped."""
    return weights * dropped(weights, tuple(weights.shape), p) if p else weights


def random_multi_head(*args: Any, **named: Any) -> Any:
    """Return what multi-head attention does if its weights are behind dropout."""
    rate, training = named.get("dropout_p"), named.get("training", True)
    if rate is None:
        rate = args[10]
    if len(args) > 13:
        training = args[13]
    return multi_head(*args, **named) if rate and training else NotImplemented


def multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Return (y (L, B, E), A (B, L, S) or (B, heads, L, S) or None) of query (L, B, E), key and
    value (S, B, …); without B where the query has none.
    """
    if static_k is not None or static_v is not None or (is_causal and attn_mask is None):
        return NotImplemented
    alone = query.ndim == 2
    same = query is key and key is value
    if alone:
        query, key, value = (one.unsqueeze(1) for one in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if in_proj_weight is not None:
        weights = in_proj_weight.chunk(3)
    if same and not use_separate_proj_weight:
        q, k, v = linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)  # type: ignore[arg-type]
    else:
        q, k, v = (
            linear(one, weight, bias)
            for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
    batch = query.shape[1]
    looked = []
    for tensor, extra in ((k, bias_k), (v, bias_v)):
        if extra is not None:
            tensor = torch.cat([tensor, extra.expand(1, batch, -1)])
        if add_zero_attn:
            tensor = torch.cat([tensor, torch.zeros_like(tensor[:1])])
        looked.append(tensor)
    more = looked[0].shape[0] - key.shape[0]
    heads = [one.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for one in (q, *looked)]
    scores = (heads[0] * (1 / math.sqrt(heads[0].shape[-1]))) @ heads[1].mT  # (B, heads, L, S)
    if attn_mask is not None:
        bias = forbidden(attn_mask, scores.dtype)
        if bias.ndim == 3:
            bias = bias.unflatten(0, (-1, num_heads))
        scores = scores + torch.nn.functional.pad(bias, (0, more))
    if key_padding_mask is not None:
        bias = forbidden(key_padding_mask, scores.dtype)[:, None, None]
        scores = scores + torch.nn.functional.pad(bias, (0, more))
    found = behind_dropout(torch.softmax(scores, -1), dropout_p if training else 0.0)
    mixed = (found @ heads[2]).permute(2, 0, 1, 3).flatten(-2)
    result = linear(mixed, out_proj_weight, out_proj_bias)
    shown = None
    if need_weights:
        shown = found.mean(1) if average_attn_weights else found
        shown = shown[0] if alone else shown
    return result.squeeze(1) if alone else result, shown
